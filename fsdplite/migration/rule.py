"""What is known about one name of another engine, and what was found in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ANY", "CHANGE", "DROP", "KEEP", "NONE", "UNIT", "VERDICTS", "Argument", "Engine", "Finding", "Rule"]

CHANGE, DROP, KEEP, NONE = "change", "drop", "keep", "none"

VERDICTS = {
    CHANGE: "to write differently",
    DROP: "to leave out",
    KEEP: "as they are",
    NONE: "without a counterpart",
}

ANY = "any object"

UNIT = "fsdp.FSDPUnit"  # what wrapping makes of a module's class


@dataclass(frozen=True)
class Argument:
    """What becomes of one argument of a call.

    Attributes:
        to: Keyword of the counterpart that takes its value; ``"1"`` is its place after the first argument.
        values: What to write for a value, by the literal or the last name of an enum's member; several options are
            separated by ``"; "``, empty text is nothing.
        notes: What to say about a value, by the same keys.
        otherwise: What to write for a value that is not among ``values``.
        note: What to say whenever the argument is given.
        none: Why it has no counterpart; said unless the value is one of ``harmless``.
        harmless: Values with which the argument asks for nothing.
        number: Why a number has no counterpart.
        absent: What to write if it is not given, because the defaults differ.
        absent_note: What to say if it is not given.
        templates: What takes the place of the rule's ``write`` for a value.
    """

    to: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""
    note: str = ""
    none: str = ""
    harmless: tuple[str, ...] = ("None", "False")
    number: str = ""
    absent: str = ""
    absent_note: str = ""
    templates: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """What is known about one or more names.

    Attributes:
        names: The names, separated by spaces; below the engine's modules, or methods if ``of`` is set.
        write: The counterpart. ``{name}`` is the text of the call's argument of that name, ``{name=x}`` has a default
            (``@other`` is another argument), ``{name!*}`` its elements, ``{name!policy}`` a policy made of a predicate,
            ``{name!union}`` of policies, ``{name!count}`` how many there are, ``{name!owner}`` the model whose
            parameters it holds, ``{name!settings}`` what a DeepSpeed configuration asks for,
            ``{args!models}`` a wrap of each model among all arguments by position (``parameters`` is ``*args``),
            ``{self}`` the object whose method is called, ``{options}`` what ``arguments`` make of the others.
        verdict: One of ``VERDICTS``.
        note: What to know about it.
        parameters: Names of the parameters that may be given by position, separated by spaces.
        arguments: The others that matter.
        reference: What to write where the name is not called. None: as ``write``; empty: that is no use.
        handed_on: What to write where a class is handed on, to be called somewhere else; empty: as ``reference``.
        of: Kind of the object that has this method or attribute; ``ANY`` for names that only this engine has.
        is_attribute: It is no method.
        knows_all: ``parameters`` and ``arguments`` are all there are: any other argument is told of.
        by_receiver: For a method, patterns of the object's text and what to write in place of ``write``.
        makes: Kind of what a call returns, and of its first argument if that is changed in place.
        covers: An argument of which this call's counterpart speaks too: what it names is not reported again.
    """

    names: str
    write: str = ""
    verdict: str = CHANGE
    note: str = ""
    parameters: str = ""
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    reference: str | None = None
    handed_on: str = ""
    of: str = ""
    is_attribute: bool = False
    knows_all: bool = False
    by_receiver: Mapping[str, str] = field(default_factory=dict)
    makes: str = ""
    covers: str = ""


@dataclass(frozen=True)
class Engine:
    """One engine's table.

    Attributes:
        name: As it is called in what is printed.
        modules: Where its names are imported from; deeper modules count too.
        rules: Its names.
        is_complete: Other names below its modules are reported as unknown.
    """

    name: str
    modules: tuple[str, ...]
    rules: tuple[Rule, ...]
    is_complete: bool = False


@dataclass(frozen=True)
class Finding:
    """One use.

    Attributes:
        line: From 1.
        column: From 1.
        engine: Whose name it is.
        found: The source, on one line.
        verdict: One of ``VERDICTS``.
        write: The counterpart, in Python; empty where there is nothing to write.
        notes: What to know about it.
    """

    line: int
    column: int
    engine: str
    found: str
    verdict: str
    write: str = ""
    notes: tuple[str, ...] = ()
