"""Loading: first everything is checked, then this rank's parts are read."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from autopar.errors import AutoparError
from autopar.runtime.agree import from_rank0
from autopar.runtime.checkpoint import folder as folders
from autopar.runtime.checkpoint import optimizer as optimizers
from autopar.runtime.checkpoint import state as states
from autopar.runtime.checkpoint.errors import on_every_rank, translated
from autopar.runtime.checkpoint.index import Index, check_files, corrupt, from_json
from autopar.runtime.checkpoint.kept import Kept, open_kept, state_names
from autopar.runtime.checkpoint.planners import LoadParts, metadata_of
from autopar.runtime.checkpoint.state import Running
from autopar.runtime.checkpoint.storage import Reader
from autopar.runtime.leaves import Leaf
from autopar.runtime.pieces import Parts, parts_of
from autopar.runtime.weights import listed

SHOWN = 5
"""How many differences an error lists."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A checkpoint that fits the running program. Nothing of that is changed before `read`."""

    path: Path
    index: Index
    metadata: Metadata
    optimizer: optimizers.Restored | None
    kept: Kept
    parts: Mapping[str, Parts]
    random: Mapping[str, Parts] | None
    """None: the stream stays what it is. Empty: the checkpoint has none for this rank."""

    @property
    def step(self) -> int:
        """How many optimizer steps had been taken."""
        step = self.index.facts[states.STEP]
        assert isinstance(step, int)
        return step

    def read(self, running: Running) -> None:
        """Fills weights, optimizer and random stream. A collective.

        Errors: AutoparError, on every rank, for files that aren't what was written; the weights are
        then partly overwritten.
        """
        with translated(f"Loading {self.path}", ""):
            load(
                {},
                storage_reader=Reader(self.path, self.index, self.metadata),
                planner=LoadParts(self.parts, self.metadata),
                process_group=running.mesh.world.process_group,
                no_dist=running.mesh.world.size == 1,
            )
        on_every_rank(running.mesh, lambda: self._take_over(running))

    def _take_over(self, running: Running) -> None:
        self.kept.clear()
        if self.random is not None:
            running.random.seed = self.index.facts[states.SEED] + running.data_rank
        if self.random:
            prefix = f"{states.RANDOM}/{running.data_rank}/"
            stream = {k.removeprefix(prefix): p.pieces[0].view for k, p in self.random.items()}
            try:
                running.random.restore(stream)
            except RuntimeError as error:  # torch looks whether the bytes are a generator's state
                raise corrupt(self.path, f"its random state is none ({error})") from error
        elif self.random is not None:
            running.random.reseed(states.reseeded(running, self.index.facts))
        if self.optimizer is not None:
            self.optimizer.apply(running.optimizer, running.leaves)


def open_checkpoint(running: Running, folder: Path, drop_state: Collection[str]) -> Opened:
    """The newest complete checkpoint in `folder`, if it fits the running program. A collective.

    Errors: AutoparError, on every rank: no complete checkpoint, a corrupt one, another model's, or
    state that this program doesn't know and that isn't dropped.
    """
    name, text = from_rank0(lambda: _read_index(folder))
    path = Path(name)
    return on_every_rank(running.mesh, lambda: _opened(running, path, text, drop_state))


def _read_index(folder: Path) -> tuple[str, str]:
    path = folders.newest(folder)
    try:
        text = (path / folders.INDEX).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise corrupt(path, f"{folders.INDEX} can't be read ({error})") from error
    check_files(from_json(text, path), path)
    return str(path), text


def _opened(running: Running, path: Path, text: str, drop_state: Collection[str]) -> Opened:
    index = from_json(text, path)
    _check_names(index, drop_state)
    by_saved_name = _match_weights(index, running.everywhere)
    parts = {
        f"{states.WEIGHT}/{name}": parts_of(leaf, running.mesh, leaf.value)
        for name, leaf in by_saved_name.items()
        if leaf.here
    }
    kept = open_kept(index, running.kept, by_saved_name, running.mesh, drop_state)
    parts |= kept.parts
    optimizer, random = None, None
    try:
        if wrong := {name.partition("/")[0] for name in index.tensors} - states.SECTIONS:
            raise ValueError(f"it has {listed(sorted(wrong))}")
        metadata = metadata_of(index)
        if type(index.facts[states.STEP]) is not int or type(index.facts[states.SEED]) is not int:
            raise ValueError("its step and its seed are no whole numbers")
        if optimizers.SECTION not in drop_state:
            optimizer = optimizers.restored(
                index, running.optimizer, running.leaves, by_saved_name, running.mesh
            )
            parts |= optimizer.parts
        if states.RANDOM not in drop_state:
            random = states.random_parts(running, index)
            parts |= random
    except (ValueError, KeyError) as error:
        raise corrupt(path, f"its content is wrong ({error})") from error
    return Opened(path, index, metadata, optimizer, kept, parts, random)


def _check_names(index: Index, drop_state: Collection[str]) -> None:
    """Errors: AutoparError for a name to drop that there isn't."""
    there = sorted({optimizers.SECTION, states.RANDOM, *state_names(index)})
    if wrong := sorted(set(drop_state) - set(there)):
        raise AutoparError(
            f"drop_state names {listed(wrong)}; this checkpoint has {listed(there)}."
        )


def _match_weights(index: Index, leaves: tuple[Leaf, ...]) -> dict[str, Leaf]:
    """Leaves by their names in the checkpoint (a tied tensor may be saved under any of its names).

    Errors: AutoparError with the first differences of another model.
    """
    prefix = f"{states.WEIGHT}/"
    saved = {k.removeprefix(prefix): s for k, s in index.tensors.items() if k.startswith(prefix)}
    found = {name: leaf for leaf in leaves for name in (leaf.name, *leaf.also) if name in saved}
    differences = [
        *(f"it has {name}, the program hasn't" for name in sorted(saved.keys() - found.keys())),
        *(f"it has no {leaf.name}" for leaf in leaves if leaf not in found.values()),
        *_other_tensors(index, found),
    ]
    if differences:
        more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise AutoparError(
            f"The checkpoint is another model's: {'; '.join(differences[:SHOWN])}{more}. Compile "
            "the model that it was saved from; load_weights takes plain weights of any dtype."
        )
    return found


def _other_tensors(index: Index, found: Mapping[str, Leaf]) -> Iterator[str]:
    for name, leaf in found.items():
        saved = index.tensors[f"{states.WEIGHT}/{name}"]
        here = f"{leaf.declaration.shape} {leaf.declaration.dtype}"
        if f"{saved.shape} {saved.dtype}" != here:
            yield f"its {name} is {saved.shape} {saved.dtype}, the program's is {here}"
