"""Jinja for templates that may come from anywhere: sandboxed, and every one ends within a second or two.

The sandbox keeps a template from Python's insides. What it leaves open is a template that runs for years or fills the
memory, and that is bounded here by counting: every loop turn, call, filter and operator is a step; every value that a
step makes is measured, before it is made where it could be far larger than what it is made from. Not here: what the
templates are for (chat.py).
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from leftward.errors import UserError

MAX_SOURCE = 2**18
"""Characters of a template; the longest of the field have a tenth of it."""
_MAX_STEPS = 500_000
_MAX_SECONDS = 1.5  # of this thread's own time
_MAX_SIZE = 2**24  # characters, beside what the conversation has
_NODE = 16  # what a place in a list takes, in characters
_MAX_BITS = 4096  # of an integer
_MAX_DEPTH = 200

# What makes more than it is given: at most its size times the largest of its arguments.
_GROWING = {"replace", "join", "center", "ljust", "rjust", "zfill", "indent", "expandtabs", "translate", "batch"}
_GROWING |= {"tojson", "wordwrap", "slice", "format", "format_map"}
_LEFT_OUT = ("urlize", "striptags", "xmlattr", "random", "pprint")
"""Filters for HTML, one that is different each time and one that is slow for large values."""
# Widths stand in a format's text, and make spaces from nothing.
_WIDTH = re.compile(r"%[-+ #0]*(\*|\d{4}|\d*\.(\*|\d{4}))|\{[^{}]*(\{|:[^{}]*\d{4})")


class TemplateRefusal(Exception):
    """The template's own objection to a conversation."""


class _Budget:
    """What one rendering may still do."""

    def __init__(self, given: int) -> None:
        self.size = _MAX_SIZE + 8 * given
        self.steps = _MAX_STEPS
        self.until = time.thread_time() + _MAX_SECONDS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise UserError(f"it takes more than {_MAX_STEPS:,} steps")
        if self.steps % 64 == 0 and time.thread_time() > self.until:
            raise UserError(f"it takes more than {_MAX_SECONDS:g} seconds")

    def fits(self, size: int) -> None:
        if size > self.size:
            raise UserError(f"it makes a text or list of more than {self.size:,} characters")

    def measure(self, value: Any, depth: int = 0) -> int:
        """The size of a value when written out, where what stands in it twice counts twice."""
        if isinstance(value, (str, bytes)):
            size = len(value)
        elif isinstance(value, int):
            if value.bit_length() > _MAX_BITS:
                raise UserError(f"it makes a number of more than {_MAX_BITS} bits")
            size = 1 + value.bit_length() // 3
        elif isinstance(value, (list, tuple, Mapping)):
            self.step()
            if depth > _MAX_DEPTH:
                raise UserError(f"it makes lists in lists, more than {_MAX_DEPTH} deep")
            size = _NODE
            for part in value if not isinstance(value, Mapping) else itertools.chain(value.keys(), value.values()):
                size += _NODE + self.measure(part, depth + 1)
                self.fits(size)
        elif isinstance(value, Namespace):  # they may hold each other, and nobody writes one out
            raise UserError("it uses a namespace as a value")
        else:
            size = 1
        self.fits(size)
        return size

    def check_growth(self, operation: str, value: Any, arguments: Iterable[Any]) -> None:
        """Before an operation whose result may be as large as the product of what it is made from."""
        sizes = [abs(a) if isinstance(a, int) else self.measure(a) for a in arguments]
        self.fits(self.measure(value) * (1 + max(sizes, default=0)))
        if operation in ("format", "format_map", "%") and _WIDTH.search(str(value).replace("{{", "")):
            raise UserError(f"the format {str(value)[:60]!r} asks for a width that is large or not written in it")


_budget: ContextVar[_Budget] = ContextVar("budget")


def compile_template(
    source: str, functions: Mapping[str, Callable[..., Any]], filters: Mapping[str, Callable[..., Any]]
) -> jinja2.Template:
    """`functions` and `filters` are what it may use beside Jinja's own. Raises: UserError, for what is no template."""
    if len(source) > MAX_SOURCE:
        raise UserError(f"it has {len(source):,} characters: the most that is read is {MAX_SOURCE:,}")
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
    )
    environment.globals.update(functions)
    environment.filters.update({name: _bounded_filter(name, filter) for name, filter in filters.items()})
    return _bounded(0, lambda: environment.from_string(source))


def render(template: jinja2.Template, given: int, variables: Mapping[str, Any]) -> str:
    """The text. `given` is the size of the variables.

    Raises: UserError, for what goes wrong in the template. TemplateRefusal, where it objects.
    """

    def run() -> str:
        pieces: list[str] = []
        size = 0
        for piece in template.generate(**variables):
            size += len(piece)
            _budget.get().fits(size)
            pieces.append(piece)
        return "".join(pieces)

    return _bounded(given, run)


def raise_exception(message: object) -> None:
    """What templates call where a conversation is not to their liking."""
    raise TemplateRefusal(str(message))


def _bounded(given: int, run: Callable[[], Any]) -> Any:
    token = _budget.set(_Budget(given))
    try:
        return run()
    except (UserError, TemplateRefusal):
        raise
    except RecursionError:
        raise UserError("it is nested too deeply") from None
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"line {error.lineno}: {error.message}") from None
    except Exception as error:  # templates raise whatever Python raises for what they do
        raise UserError(f"{error}" or type(error).__name__) from None
    finally:
        _budget.reset(token)


class _Bounds(NodeTransformer):
    """Puts a counter into every loop, and a measure around what literals and `~` make."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "_joined")

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _filtered(node, "_measured")

    visit_Dict = visit_Tuple = visit_List


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, finalize=_finalized)
        del self.globals["lipsum"]
        kept = {name: filter for name, filter in self.filters.items() if name not in _LEFT_OUT}
        self.filters = {name: _bounded_filter(name, filter) for name, filter in kept.items()}
        self.filters |= {"_counted": _counted, "_joined": _joined, "_measured": _measured}

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        pieces = list(pieces)
        _budget.get().fits(sum(map(len, pieces)))
        return "".join(pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        if (name := getattr(method, "__name__", "")) in _GROWING:
            budget.check_growth(name, getattr(method, "__self__", ""), [*args, *kwargs.values()])
        result = super().call(context, obj, *args, **kwargs)
        if not isinstance(result, Namespace):
            budget.measure(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if operator == "**":
            if not all(isinstance(side, (int, float)) for side in (left, right)):
                raise TypeError("** takes numbers")
            if isinstance(left, int) and isinstance(right, int) and right > 0:
                budget.measure(1 << min(left.bit_length() * right, 2 * _MAX_BITS))
        elif operator == "*":
            count, value = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(count, int) and not isinstance(value, (int, float)):
                budget.fits(budget.measure(value) * max(count, 0))
        elif operator == "+":
            budget.fits(budget.measure(left) + budget.measure(right))
        elif isinstance(left, (str, bytes)):
            budget.check_growth(operator, left, [right])
        result = super().call_binop(context, operator, left, right)
        budget.measure(result)
        return result


class _Generation(Extension):
    """`{% generation %}`, which marks for a training what the assistant says, and changes no text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _bounded_filter(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    passed = 1 if hasattr(filter, "jinja_pass_arg") else 0  # the context or the environment comes first

    @functools.wraps(filter)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if name in _GROWING:
            budget.check_growth(name, args[passed], [*args[passed + 1 :], *kwargs.values()])
        result = filter(*args, **kwargs)
        budget.measure(result)
        return result

    return bounded


@jinja2.pass_context
def _finalized(context: Context, value: Any) -> Any:
    """Before a value is written. With the context, so that nothing is written while compiling."""
    _budget.get().measure(value)
    return value


@jinja2.pass_context
def _counted(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()

    def counted() -> Iterator[Any]:
        for value in values:
            budget.step()
            yield value

    return counted()


@jinja2.pass_context
def _joined(context: Context, values: Iterable[Any]) -> str:
    budget = _budget.get()
    budget.step()
    parts = list(values)
    budget.measure(parts)
    return "".join(map(str, parts))


@jinja2.pass_context
def _measured(context: Context, value: Any) -> Any:
    budget = _budget.get()
    budget.step()
    budget.measure(value)
    return value
