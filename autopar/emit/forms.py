"""Functions that run ops in their strategies' own ways."""

from autopar.layouts.program import Program


def form_functions(program: Program) -> list[tuple[str, str]]:
    """The module and name of each function that the program's ops are run by."""
    return sorted(
        {
            (module, name)
            for chosen in program.choices.values()
            for candidate in chosen.values()
            for form in candidate.forms
            if form.function
            for module, name in [form.function.split(":", 1)]
        }
    )


def form_imports(program: Program) -> list[str]:
    """Their import lines."""
    return [f"from {module} import {name}" for module, name in form_functions(program)]
