"""HiGHS and CBC on the same models: what each finds, proves and takes.

python benchmarks/across_solvers.py [--limit seconds] [model cluster samples …]

Each plan is made in a process of its own. Errors: exit status 1 where a solver's bound is above the
step that the other one found. Without arguments: GPT-2, GPT-2 XL with little memory, Mixtral-8x7B
and Llama-3-8B.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from full_size import job_of

SOLVERS = ("highs", "cbc")
CASES = (
    ("gpt2-124M", "h100:8", "8"),
    ("gpt2-xl", "v100:8", "16"),
    ("mixtral-8x7B", "h100:16", "32"),
    ("llama3-8B", "h100:64", "512"),
)
ROUNDING = 1e-9


def measure(name: str, cluster: str, samples: str, solver: str, limit: str) -> dict[str, Any]:
    """One plan, in this process."""
    import warnings

    import autopar

    warnings.simplefilter("ignore")
    job = job_of(name, cluster, int(samples))
    start = time.perf_counter()
    compiled = autopar.compile(
        job.model, cluster, job.batch, loss=job.loss, solver=solver, time_limit_s=float(limit)
    )
    plan = compiled.plan
    return {
        "seconds": time.perf_counter() - start,
        "axes": {axis: size for axis, size in plan.axes.items() if size > 1},
        "step_s": plan.predicted.step_s,
        "bound_s": plan.certificate.bound_s,
        "gap": plan.certificate.gap,
    }


def run(*given: str) -> dict[str, Any]:
    """One plan, in a process of its own. Errors: RuntimeError with what it said."""
    command = [sys.executable, __file__, "--one", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--limit", default="300")
    parser.add_argument("cases", nargs="*", help="model cluster samples …")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*given.cases)))
        return
    every, wrong = given.cases, False
    for case in list(zip(every[::3], every[1::3], every[2::3], strict=True)) or CASES:
        plans = {solver: run(*case, solver, given.limit) for solver in SOLVERS}
        for solver, plan in plans.items():
            mesh = " · ".join(f"{axis}{size}" for axis, size in plan["axes"].items())
            print(
                f"{' '.join(case)}, {solver}: {plan['seconds']:.1f} s; {mesh}, step "
                f"{plan['step_s']:.5f} s, bound {plan['bound_s']:.5f} s, gap {plan['gap']:.2%}",
                flush=True,
            )
        least_s = min(plan["step_s"] for plan in plans.values())
        above = [s for s, p in plans.items() if p["bound_s"] > least_s * (1 + ROUNDING)]
        if above:
            wrong = True
            print(f"  the bound of {', '.join(above)} is above a step that was found", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
