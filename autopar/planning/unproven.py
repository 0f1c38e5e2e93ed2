"""The certificate of a plan that no search made."""

from autopar.plan import Certificate


def unproven(step_s: float) -> Certificate:
    """No step is faster than 0 s."""
    return Certificate("none", step_s, 0.0, 1.0, 0.0, 0, 0, 0, 0)
