"""Every factor rule against brute force: the op on the halves of each dim that it frees."""

import pytest
from rule_cases import Case, cases
from rule_checks import Traced

from autopar.graph.ops import OPS_BY_CLASS

CASES = cases()
NOT_ALONE = {"layer", "getitem", "constant", "buffer_update"}
"""Classes that take no tensor, only pass on what another op made, or make a statement."""


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_a_rule_tells_the_truth(case: Case) -> None:
    """The halves of the inputs give the halves of the result, or sum to it where contracted."""
    target, args, count = case
    named = args[-1] if isinstance(args[-1], dict) else {}
    traced = Traced(target, tuple(a for a in args if a is not named), named)
    checked = [leaf for leaf in traced.splittable() if traced.check(leaf)]
    assert len(checked) == count, (checked, traced.rule)


def test_every_op_has_a_case() -> None:
    """A rule that nobody checks is a rumour."""
    known = {n for c, names in OPS_BY_CLASS.items() if c not in NOT_ALONE for n in names.split()}
    assert known == {target._schema.name.split("::")[1] for target, _, _ in CASES}


def test_no_op_is_in_two_classes() -> None:
    """An op's class is one."""
    every = [name for names in OPS_BY_CLASS.values() for name in names.split()]
    assert len(every) == len(set(every))
