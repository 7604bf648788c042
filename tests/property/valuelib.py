# SPDX-License-Identifier: Apache-2.0
"""Comparing values as a checkpoint must give them back: kinds, order, -0.0 and NaN included."""
import collections
import dataclasses
import enum
import typing


class Phase(enum.Enum):
    WARMUP = "warmup"
    DECAY = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


class Parts(enum.Flag):
    MODEL = 1
    OPTIMIZER = 2
    DATA = 4


Point = collections.namedtuple("Point", "x y", defaults=(0,))


class Span(typing.NamedTuple):
    begin: int
    end: int = 7


@dataclasses.dataclass
class Config:
    lr: float
    betas: tuple = (0.9, 0.95)
    phase: Phase = Phase.WARMUP
    tags: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str
    inner: object = None


@dataclasses.dataclass
class Slotted:
    __slots__ = ("a", "b")
    a: int
    b: int


TYPES = [Phase, Level, Parts, Point, Span, Config, Frozen, Slotted]


def content(value):
    """What `same` compares, in plain comparable form: repr of floats, kinds beside everything."""
    kind = type(value)
    if kind in (float, complex):
        return kind, repr(value)
    if kind in (list, tuple, collections.deque):
        return kind, getattr(value, "maxlen", None), [content(item) for item in value]
    if kind in (set, frozenset):
        return kind, sorted(map(content, value), key=repr)
    if isinstance(value, dict):
        return kind, getattr(value, "default_factory", None), [(content(k), content(v)) for k, v in value.items()]
    if isinstance(value, tuple):                                       # named tuples, torch.Size
        return kind, [content(item) for item in value]
    if kind is slice:
        return kind, content((value.start, value.stop, value.step))
    if kind.__name__ in ("SimpleNamespace", "Namespace"):
        return kind, content(vars(value))
    if dataclasses.is_dataclass(value):
        return kind, [(field.name, content(getattr(value, field.name))) for field in dataclasses.fields(value)]
    if kind.__name__ == "Record":
        return kind, value.type_name, value.tag, [(name, content(item)) for name, item in value.items()]
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        return kind, repr(value)
    return kind, value


def same(a, b):
    return content(a) == content(b)
