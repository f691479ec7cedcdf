"""What a task is in the catalogue: the columns that it reads, and what adapters have to know of it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from service.text import listed


@dataclass(frozen=True)
class Task:
    """One task. Its functions are in training/tasks, in a file of the same name.

    `column_sets` are the sets of columns that it can be read from, the first one that is there being read; `columns`
    are the usual names of each kind of column. `beside`: a further kind -> the kind that it accompanies; it is read
    where the data has it, and single rows may lack it. `peft` is the adapter's task type in peft; `heads` are names of
    output layers that are new for the job, which are trained whole and never quantised. `needs_mask`: tokens attend to
    later ones, so that padding has to be masked. `labels_are_classes`: one label a sample, not one a token.
    `null_is_empty_text`: a text that is null is read as an empty one, elsewhere it is a mistake.
    """

    name: str
    summary: str
    needs: str
    column_sets: tuple[tuple[str, ...], ...]
    peft: str | None
    heads: tuple[str, ...] = ()
    needs_mask: bool = True
    labels_are_classes: bool = False
    null_is_empty_text: bool = False
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds of columns that the task may read."""
        return (*dict.fromkeys(kind for kinds in self.column_sets for kind in kinds), *self.beside)

    def usual(self, kind: str, given: str | None, there: Collection[str]) -> str | None:
        """The column of a kind: the one that is given, else the first usual name that is there."""
        return given if given is not None else next((name for name in self.columns[kind] if name in there), None)

    def columns_in(
        self, given: Mapping[str, str | None], there: Collection[str], in_others: Iterable[str] = ()
    ) -> dict[str, str] | None:
        """Kind -> column for the first set of columns that is there, sets with a given column first, or None.

        Columns that only other rows have are `in_others`: of these, what may stand beside a set is read.
        """
        named = {self.beside.get(kind, kind) for kind, column in given.items() if column}
        there = [name for name in there if name not in given.values()]  # what is named is of no other kind
        for kinds in sorted(self.column_sets, key=lambda kinds: not named & set(kinds)):
            found = {kind: self.usual(kind, given.get(kind), there) for kind in kinds}
            if all(found.values()):
                free = ({*there, *in_others} - set(found.values())) - set(given.values())
                more = [kind for kind, of in self.beside.items() if of in kinds]
                found |= {kind: self.usual(kind, given.get(kind), free) for kind in more}
                return {kind: column for kind, column in found.items() if column}
        return None

    def needed(self, columns: Mapping[str, str]) -> tuple[str, ...]:
        """Those of the columns (kind -> column) that every row has."""
        return tuple(column for kind, column in columns.items() if kind not in self.beside)

    def lacking(self, given: Mapping[str, str | None], there: Collection[str]) -> str | None:
        """A sentence when no set of columns that the task can read is there, else None."""
        if self.columns_in(given, there) is not None:
            return None
        pairs = zip(self.column_sets[0], [*there, *self.column_sets[0]], strict=False)
        named = ", ".join(f"{kind}: {json.dumps(column, ensure_ascii=False)}" for kind, column in pairs)
        hint = f"; say which is which, as in dataset.columns: {{{named}}}" if there else ""
        return f"dataset.columns: {self.needs}; the data has: {listed(there)}{hint}"
