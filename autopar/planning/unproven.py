"""The certificate of a plan that no search made."""

from dataclasses import replace

from autopar.plan import Certificate, Plan


def unproven(step_s: float) -> Certificate:
    """No step is faster than 0 s."""
    return Certificate("none", step_s, 0.0, 1.0, 0.0, 0, 0, 0, 0)


def without_proof(plan: Plan, note: str) -> Plan:
    """The plan with nothing proven of it, and why it was made."""
    return replace(
        plan,
        certificate=unproven(plan.predicted.step_s),
        alternatives=(),
        assumptions=(*plan.assumptions, note),
    )
