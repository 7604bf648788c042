# SPDX-License-Identifier: Apache-2.0
"""Python's pickles as data, as core/foreign/pickle.h reads them: a pickle is a program for a small machine with a
stack, and this machine builds nothing but values.

A name in a pickle is a text that is looked up in the tables of a `Known`, and nowhere else: no module is imported, no
attribute is read. What a pickle calls is a function of those tables, which looks at its arguments before it uses them.
A state is given to what waits for one, never to an object that is there already; so no __setstate__ runs, and no
attribute is set. Containers are filled only where they are exactly list, dict and the like.

Memory and work are linear in the pickle's bytes: copies of values that may be at many places are counted (`charge`),
keys whose hash others can choose are few, and nothing recurses. Protocols 2 to 5, as Python writes them."""
from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

Call: TypeAlias = "Callable[..., Any]"

COPIES = 4                      # bytes and items that calls may copy, for each byte of the pickle
KEY_PARTS = 256                 # of a tuple or frozenset that is a key
ODD_KEYS = 4096                 # keys whose hash a stranger can choose: tuples, complex numbers, what numpy has
SHOWN = 200                     # letters of a name in a message
PLAIN_KEYS = {str, bytes, bool, float, type(None)}
MISSING = object()
PYTHON_2 = {"__builtin__.xrange": "builtins.range", "__builtin__.long": "builtins.int",
            "__builtin__.unicode": "builtins.str"}


class Refused(ValueError):
    """The pickle is broken, or there is something in it that is not known here: the sentence says what. `what` is the
    sentence without the place."""

    def __init__(self, text: str, what: str | None = None) -> None:
        super().__init__(text)
        self.what = text if what is None else what


class Name:
    """A class or a function by its name: to be called, or to be an argument; never a value."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Unfinished:
    """The result of a call that gets its content by the state that follows. numbers: its places in the memo."""

    __slots__ = ("args", "numbers", "text")

    def __init__(self, text: str, args: tuple[Any, ...]) -> None:
        self.text, self.args = text, args
        self.numbers: list[int] = []


class Known(NamedTuple):
    """All that a pickle may name, as MODULE.NAME."""
    constants: Mapping[str, Any]        # their values
    calls: Mapping[str, Call]           # (machine, *arguments) -> value
    states: Mapping[str, Call]          # those that wait for a state: (machine, state, *arguments) -> value
    words: frozenset[str]               # arguments only
    keys: tuple[type, ...]              # types that can be keys, besides Python's own


def unknown(what: str) -> Refused:
    return Refused(f"{what} is not one of those that vckpt reads from a pickle")


def shown(text: str) -> str:
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:SHOWN])


def modern(text: str) -> str:
    """A name as this Python and this numpy have it: protocol 2 keeps those of Python 2."""
    text = PYTHON_2.get(text, text)
    for old, new in ("__builtin__.", "builtins."), ("numpy.core.", "numpy._core."):
        if text.startswith(old):
            return new + text[len(old):]
    return text


class Machine:
    """One pickle."""

    def __init__(self, data: bytes, known: Known) -> None:
        self.data, self.known, self.at = data, known, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.left, self.odd_keys = COPIES * len(data) + 4096, 0

    def run(self) -> Any:
        value = self.value()
        if self.at != len(self.data):
            raise self.wrong("it goes on after its value")
        return value

    def value(self) -> Any:
        while (opcode := self.take(1)[0]) != STOP:
            step = OPCODES.get(opcode)
            if step is None:
                raise self.wrong(f"opcode 0x{opcode:02x} is not known here")
            step(self)
        value = self.pop()
        if self.stack or self.marks:
            raise self.wrong("it leaves something besides its value")
        return value

    def persistent(self, identity: Any) -> Any:
        raise self.wrong("it refers to an object outside of it")

    def wrong(self, what: str) -> Refused:
        return Refused(f"at byte {min(self.at, len(self.data))} of the pickle: {what}", what)

    def charge(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise self.wrong("it holds the same things far more often than Python writes them")

    # -- bytes --

    def take(self, count: int) -> bytes:
        begin, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise self.wrong("it ends too early")
        return self.data[begin:self.at]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def sized(self, count: int) -> bytes:
        """A number of `count` bytes, then as many bytes as it says."""
        return self.take(self.number(count))

    def text(self, data: bytes) -> str:
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.wrong("a text that is not UTF-8") from None

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            self.at = len(self.data) + 1
            raise self.wrong("it ends too early")
        found = self.take(end - self.at)
        self.at += 1
        return self.text(found)

    def proto(self) -> None:
        if self.number(1) not in range(2, 6):
            raise self.wrong("its protocol is none of 2 to 5")

    # -- stack and memo --

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def top(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise self.wrong("its stack is empty")
        return self.stack[-1]

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def last(self, count: int) -> list[Any]:
        """The uppermost values, which leave the stack."""
        return [self.pop() for _ in range(count)][::-1]

    def marked(self) -> list[Any]:
        """What is above the last mark."""
        if not self.marks:
            raise self.wrong("it has no mark")
        floor = self.marks.pop()
        found = self.stack[floor:]
        del self.stack[floor:]
        return found

    def drop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()            # Python's own reader drops the mark then
        else:
            self.pop()

    def keep(self, number: int) -> None:
        value = self.memo[number] = self.top()
        if type(value) is Unfinished:
            value.numbers.append(number)

    def again(self, number: int) -> None:
        value = self.memo.get(number, MISSING)
        if value is MISSING:
            raise self.wrong("it uses a value of its memo that is not there")
        if type(value) is int:
            self.charge(value.bit_length() >> 6)        # the only values without bounds that Python writes each time
        self.push(value)

    # -- containers --

    def extend(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) is not list and type(target) is not deque:
            raise self.wrong("it fills something that is no list")
        target.extend(items)

    def add(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) is not set:
            raise self.wrong("it fills something that is no set")
        self.check_keys(items)
        target.update(items)

    def fill(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) not in (dict, OrderedDict, defaultdict) or len(items) % 2:
            raise self.wrong("it fills something that is no dict, or gives a key without a value")
        self.check_keys(items[::2])
        target.update(zip(items[::2], items[1::2]))

    def frozen(self) -> None:
        items = self.marked()
        self.check_keys(items)
        self.push(frozenset(items))

    def check_keys(self, keys: list[Any]) -> None:
        """Python's hashes of numbers and tuples are no secret: many keys of one hash would take quadratic time, and
        tuples of tuples of tuples, each of them twice in the next, an exponential one."""
        for key in keys:
            kind = type(key)
            if kind not in PLAIN_KEYS and (kind is not int or key.bit_length() > 63):
                self.odd_keys += 1
                if self.odd_keys > ODD_KEYS:
                    raise self.wrong(f"more than {ODD_KEYS:,} keys that are neither texts nor numbers of 64 bits")
                self.check_odd(key)

    def check_odd(self, key: Any) -> None:
        parts, count = [key], 0
        while parts:
            part = parts.pop()
            count += 1 + (len(part) if isinstance(part, (tuple, frozenset)) else 0)
            if count > KEY_PARTS:
                raise self.wrong(f"a key of more than {KEY_PARTS} parts")
            if isinstance(part, (tuple, frozenset)):
                parts.extend(part)
            elif type(part) not in PLAIN_KEYS and not isinstance(part, (int, complex, *self.known.keys)):
                raise self.wrong(f"a {type(part).__name__} cannot be a key")

    # -- classes --

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise self.wrong("the name of a class is no text")
        text, known = modern(f"{module}.{name}"), self.known
        if text in known.constants:
            self.push(known.constants[text])
        elif text in known.calls or text in known.states or text in known.words:
            self.push(Name(text))
        else:
            raise unknown(f"the class {shown(text)}")

    def call(self, called: Any, args: Any) -> None:
        if type(called) is not Name or type(args) is not tuple:
            raise self.wrong("it calls something that is no class")
        if called.text in self.known.states:
            self.push(Unfinished(called.text, args))
        elif called.text in self.known.calls:
            self.push(self.made(called.text, self.known.calls[called.text], *args))
        else:
            raise self.wrong(f"{called.text} is called")

    def build(self, state: Any) -> None:
        begun = self.top()
        if type(begun) is not Unfinished:
            raise self.wrong("it gives a state to something that takes none")
        value = self.made(begun.text, self.known.states[begun.text], state, *begun.args)
        self.stack[-1] = value
        for number in begun.numbers:
            if self.memo[number] is begun:
                self.memo[number] = value

    def made(self, text: str, function: Callable[..., Any], *given: Any) -> Any:
        """Calls a function of the tables. Whatever error it, numpy or torch raises, the arguments are at fault."""
        try:
            return function(self, *given)
        except Refused:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            raise self.wrong(f"a {text} in a form that Python does not write") from None


STOP = ord(".")
OPCODES: dict[int, Callable[[Machine], object]] = {
    0x80: Machine.proto,
    0x95: lambda m: m.take(8),                                  # FRAME: how much may be read ahead
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("0"): Machine.drop,
    ord("1"): Machine.marked,
    ord("q"): lambda m: m.keep(m.number(1)),
    ord("r"): lambda m: m.keep(m.number(4)),
    0x94: lambda m: m.keep(len(m.memo)),
    ord("h"): lambda m: m.again(m.number(1)),
    ord("j"): lambda m: m.again(m.number(4)),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    0x8a: lambda m: m.push(int.from_bytes(m.sized(1), "little", signed=True)),
    0x8b: lambda m: m.push(int.from_bytes(m.sized(4), "little", signed=True)),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    0x8c: lambda m: m.push(m.text(m.sized(1))),
    ord("X"): lambda m: m.push(m.text(m.sized(4))),
    0x8d: lambda m: m.push(m.text(m.sized(8))),
    ord("C"): lambda m: m.push(m.sized(1)),
    ord("B"): lambda m: m.push(m.sized(4)),
    0x8e: lambda m: m.push(m.sized(8)),
    0x96: lambda m: m.push(bytearray(m.sized(8))),
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.push(tuple(m.last(1))),
    0x86: lambda m: m.push(tuple(m.last(2))),
    0x87: lambda m: m.push(tuple(m.last(3))),
    ord("t"): lambda m: m.push(tuple(m.marked())),
    ord("]"): lambda m: m.push([]),
    ord("}"): lambda m: m.push({}),
    0x8f: lambda m: m.push(set()),
    0x91: Machine.frozen,
    ord("a"): lambda m: m.extend(m.last(1)),
    ord("e"): lambda m: m.extend(m.marked()),
    0x90: lambda m: m.add(m.marked()),
    ord("s"): lambda m: m.fill(m.last(2)),
    ord("u"): lambda m: m.fill(m.marked()),
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: lambda m: m.name(*m.last(2)),
    ord("R"): lambda m: m.call(*m.last(2)),
    0x81: lambda m: m.call(*m.last(2)),                         # NEWOBJ
    ord("b"): lambda m: m.build(m.pop()),
    ord("Q"): lambda m: m.push(m.persistent(m.pop())),
}
