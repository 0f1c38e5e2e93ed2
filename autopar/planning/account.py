"""What a finished program costs, counted from what will really run: the plan's own figures."""

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.layouts.effects import COST_CLASS, compute_effects
from autopar.layouts.layout import Setting
from autopar.layouts.program import Program
from autopar.layouts.state_ratio import StateRatio
from autopar.plan import CollectiveTotal, Predicted, StagePredicted
from autopar.planning.books import Books, Stage, books_of, skeleton_name
from autopar.planning.prices import Prices
from autopar.planning.program_effects import stage_effects
from autopar.planning.weights import Place, Row, Spent


@dataclass(frozen=True)
class Account:
    """The predicted figures of a program, and its collectives by kind, group and phase."""

    predicted: Predicted
    collectives: tuple[CollectiveTotal, ...]


def account(program: Program, prices: Prices, state_ratio: StateRatio, tokens: int) -> Account:
    """Price a finished program."""
    every = books_by_stage(program, prices, state_ratio)
    collectives = tuple(
        CollectiveTotal(op, axes, phase, algorithm, int(b), int(n), s, stage)
        for stage, books in enumerate(every)
        for (op, axes, phase, algorithm), (b, n, s) in sorted(books.groups.items())
    )
    return Account(_predicted(program, prices, every, tokens), collectives)


def books_by_stage(program: Program, prices: Prices, state_ratio: StateRatio) -> list[Books]:
    """The books of each stage; without stages, of the one that every rank is."""
    return [
        books_of(effects, stage_of(program, stage), prices, program.setting.microbatches)
        for stage, effects in enumerate(stage_effects(program, state_ratio))
    ]


def stage_of(program: Program, stage: int) -> Stage:
    """A stage; without stages, the one that every rank is."""
    if program.cut is None:
        return Stage(((1,),), {path: 0 for path in program.choices})
    assert program.setting.schedule is not None
    table = program.setting.schedule.table
    chunks = {}
    for chunk in range(table.chunks):
        chunks[skeleton_name(chunk)] = chunk
        chunks.update(dict.fromkeys(program.cut.layers[chunk * table.stages + stage], chunk))
    return Stage(table.in_flight(stage), chunks, not table.splits_backward)


def model_flops(program: Program) -> int:
    """Flops of matrix products (convolutions and experts' included) and attention of one step on
    the whole model, forward and backward: what model flops utilisation counts."""
    setting = program.setting
    whole = Setting(setting.mesh, (), setting.microbatches)
    of_block: dict[int, int] = {}
    total = 0
    for path, block in program.model.instances():
        if id(block) not in of_block:
            ops = program.flows[path].typings
            of_block[id(block)] = sum(
                effect.flops
                for op in block.ops.values()
                if op.node.name in ops and COST_CLASS.get(op.kind) in ("matmul", "attention")
                for effect in compute_effects(block, op, None, whole)
            )
        total += of_block[id(block)]
    return total * setting.microbatches


def spent_in_step(every: Sequence[Books], setting: Setting) -> Spent:
    """What a step is made of: the plain windows of the slowest stage, as often as the step waits
    for them, those of every stage once in the pipeline, and the windows of the stage that has most
    once a step in the place of one of its plain ones."""
    per_slowest, per_stage = float(setting.microbatches), 0.0
    if setting.schedule is not None:
        table = setting.schedule.table
        per_slowest, per_stage = table.per_slowest, table.per_stage
    stages = range(len(every))
    slowest = max(stages, key=lambda i: every[i].microbatch_s)
    # Where a stage's own windows count less than once, no other than the slowest stage may do
    # without one of them: that is less than the step, but nothing is below 0.
    late = max(stages, key=lambda i: every[i].once_s) if per_stage >= 1 else slowest
    windows: dict[Place, Row] = {}
    times: dict[Place, float] = {}
    for i, books in enumerate(every):
        plain = per_stage + (per_slowest if i == slowest else 0.0) - (1.0 if i == late else 0.0)
        windows |= {(i, name): row for name, row in {**books.plain, **books.ends}.items()}
        times |= {(i, name): plain for name in books.plain}
        times |= {(i, name): 1.0 for name in books.ends if i == late}
    return Spent(windows, times, every[late].waited_once_s)


def step_seconds(every: Sequence[Books], setting: Setting) -> float:
    """The time of a step, from the books of its stages."""
    if setting.schedule is None:
        return every[0].step_s
    each = [books.microbatch_s / setting.microbatches for books in every]
    late_s = max(books.once_s for books in every)
    table = setting.schedule.table
    return table.per_slowest * max(each) + table.per_stage * sum(each) + late_s


def _predicted(program: Program, prices: Prices, every: Sequence[Books], tokens: int) -> Predicted:
    """Times are those of the slowest stage, memory that of the fullest."""
    slowest = max(every, key=lambda books: books.step_s)
    fullest = max(every, key=lambda books: books.memory_bytes)
    schedule = program.setting.schedule
    step_s = step_seconds(every, program.setting)
    flops = model_flops(program)
    dtypes = {
        str(n.meta["val"].dtype).removeprefix("torch.")
        for _, block in program.model.instances()
        for n in block.graph.nodes
        if n.name in block.params
    }
    rates = dict(prices.cluster.device.flops_per_s)
    peak = max((rates[d] for d in dtypes if d in rates), default=max(rates.values()))
    stages = tuple(StagePredicted(b.step_s, b.memory_bytes) for b in every)
    return Predicted(
        step_s,
        slowest.seconds.get("compute", 0.0),
        slowest.seconds.get("communication", 0.0),
        slowest.seconds.get("optimizer", 0.0),
        step_s - slowest.step_s if schedule is not None else 0.0,
        fullest.memory_bytes,
        fullest.memory,
        flops,
        tokens / step_s,
        flops / (step_s * program.setting.mesh.world * peak),
        stages if schedule is not None else (),
    )
