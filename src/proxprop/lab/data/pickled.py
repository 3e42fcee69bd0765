"""Read CIFAR-10's Python layout without executing pickle.

A pickle is a program for a stack machine, and running one can run anything. This reader walks the opcodes
with the standard library's disassembler and follows only those that build plain data; a call stays an inert
note of who was to be called with what, and only the shape of note that a NumPy byte array leaves is read.
"""

import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxprop.lab.refusal import Refused

RECONSTRUCT = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
ENCODE = "_codecs encode"  # How protocol 2 of Python 3 writes bytes: encode(text, "latin1").
KNOWN = RECONSTRUCT | {"numpy ndarray", "numpy dtype", ENCODE}
MARK = object()


@dataclass(frozen=True)
class Name:
    """A global that the pickle mentions; never imported."""

    text: str


@dataclass
class Call:
    """A call that the pickle asks for, and the state it sets afterwards; never made."""

    who: Name
    arguments: tuple[Any, ...]
    state: Any = None


def read(content: bytes, source: str) -> dict[str, Any]:
    """The dictionary a pickle describes, with byte arrays as NumPy arrays.

    Args:
        content: the file's bytes.
        source: its name, for the message.

    Raises:
        Refused: the pickle holds anything but plain data and byte arrays, or is damaged.
    """
    try:
        described = _walk(content)
    except Refused as refusal:
        raise Refused(f"{source}: {refusal}") from refusal
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise Refused(f"{source} is not a readable pickle: {error}") from error
    if not isinstance(described, dict):
        raise Refused(f"{source} should hold a dictionary but holds {type(described).__name__}")
    return {_text(key, source): _array(value, source) for key, value in described.items()}


def _walk(content: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name == "STOP":
            return stack.pop()
        if name in ("PROTO", "FRAME"):
            continue
        if name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(argument)])
        elif name in LITERALS:
            stack.append(LITERALS[name](argument))
        elif name in ACTIONS:
            ACTIONS[name](stack)
        else:
            raise Refused(f"opcode {name} is not one of those that build plain data")
    raise ValueError("it does not end")


def _to_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (item := stack.pop()) is not MARK:
        items.append(item)
    return items[::-1]


def _setitems(stack: list[Any]) -> None:
    items = _to_mark(stack)
    stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _appends(stack: list[Any]) -> None:
    items = _to_mark(stack)
    stack[-1].extend(items)


def _tuple(size: int) -> Any:
    def act(stack: list[Any]) -> None:
        items = tuple(stack[-size:])
        if len(items) < size:
            raise ValueError("its stack is empty")
        del stack[-size:]
        stack.append(items)

    return act


def _reduce(stack: list[Any]) -> None:
    arguments, who = stack.pop(), stack.pop()
    if not (isinstance(who, Name) and isinstance(arguments, tuple)):
        raise Refused("a call of something that is not a name")
    stack.append(
        _latin(arguments[0]) if who.text == ENCODE and arguments[1:] == ("latin1",) else Call(who, arguments)
    )


def _build(stack: list[Any]) -> None:
    state, target = stack.pop(), stack[-1]
    if not isinstance(target, Call):
        raise Refused("a state set on something that is not an array")
    target.state = state


def _setitem(stack: list[Any]) -> None:
    value, key = stack.pop(), stack.pop()
    stack[-1][key] = value


def _append(stack: list[Any]) -> None:
    item = stack.pop()
    stack[-1].append(item)


def _name(text: str) -> Name:
    if text not in KNOWN:
        raise Refused(f"it names {text.replace(' ', '.')}, which no dataset needs; this may be hostile")
    return Name(text)


def _stack_global(stack: list[Any]) -> None:
    name, module = stack.pop(), stack.pop()
    stack.append(_name(f"{module} {name}"))


def _itself(value: Any) -> Any:
    return value


def _latin(value: str) -> bytes:
    return value.encode("latin-1")


LITERALS: dict[str, Any] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "INT", "LONG1", "LONG"), _itself),
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _itself
    ),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING", "STRING"), _latin),
    "GLOBAL": _name,
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
    "EMPTY_TUPLE": lambda _: (),
    "MARK": lambda _: MARK,
}
ACTIONS: dict[str, Any] = {
    "TUPLE": lambda stack: stack.append(tuple(_to_mark(stack))),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "LIST": lambda stack: stack.append(_to_mark(stack)),
    "DICT": lambda stack: stack.append(dict(zip(*[iter(_to_mark(stack))] * 2, strict=True))),
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _setitem,
    "SETITEMS": _setitems,
    "REDUCE": _reduce,
    "BUILD": _build,
    "STACK_GLOBAL": _stack_global,
}


def _text(key: Any, source: str) -> str:
    if isinstance(key, bytes):
        return key.decode("latin-1")
    if isinstance(key, str):
        return key
    raise Refused(f"{source}: a key should be text but is {type(key).__name__}")


def _array(value: Any, source: str) -> Any:
    """Read the note a NumPy array leaves: `_reconstruct` with (version, shape, dtype, fortran, bytes)."""
    if not isinstance(value, Call):
        return value
    try:
        _, shape, dtype, fortran, raw = value.state
        content = _bytes(raw)
        right = value.who.text in RECONSTRUCT and dtype.who.text == "numpy dtype" and not fortran
        if not (right and _bytes(dtype.arguments[0]) in (b"u1", b"|u1")):
            raise ValueError("it is not a C-ordered uint8 array")
        return _reshaped(content, shape)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise Refused(f"{source}: an array cannot be read: {error}") from error


def _reshaped(content: bytes, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _bytes(value: Any) -> bytes:
    """Bytes as they are, or text where Python 2 made no difference."""
    if isinstance(value, str):
        return value.encode("latin-1")
    if isinstance(value, bytes):
        return value
    raise ValueError(f"{type(value).__name__} where bytes should stand")
