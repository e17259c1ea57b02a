"""A model's chat template, rendered as transformers renders it, within bounds of time and size.

Templates come from model folders: they are programs of strangers. jinja2's immutable sandbox keeps them from reaching
anything; here they are also kept from running or growing without end. Every turn of a loop, every call and every filter
looks at the clock; every step that could grow its operands beyond their sum (repetition, padding, joining, replacing,
printing what holds itself many times) is measured before it is made. What is left to a template is work of some
milliseconds between two looks at the clock.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.tokens.answers import Refused, Why
from router.tokens.content_format import wants_parts
from router.tokens.question import ChatPrompt

CONTINUE_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
MAX_NUMBER: Final = 1_000_000  # widths, counts and exponents in calls and filters
MAX_NESTING: Final = 100
_LONG_NUMBER: Final = re.compile(r"\d{7}")  # in a format: a width or a precision


class BadTemplate(ValueError):
    """A template that does not compile."""


class OutOfBounds(Exception):
    """Too long or too large. `slow`: it used up its time."""

    def __init__(self, what: str, *, slow: bool = False) -> None:
        super().__init__(what)
        self.slow = slow


class _Budget(threading.local):
    """What one rendering may still use; each thread renders one template at a time."""

    deadline: float = 0.0
    max_chars: int = 0


class ChatTemplate:
    """`source` compiled once; render() may be called from several threads. `time_limit_s` counts the thread's own work,
    not the time that it waits or the machine sleeps. `today` is the local time that strftime_now prints."""

    def __init__(
        self,
        source: str,
        named_tokens: dict[str, str],
        *,
        max_chars: int = 8_388_608,
        time_limit_s: float = 2.0,
        cpu_time: Callable[[], float] = time.thread_time,
        today: Callable[[], time.struct_time] = time.localtime,
    ) -> None:
        self._source = source
        self._named_tokens = named_tokens
        self._max_chars = max_chars
        self._time_limit_s = time_limit_s
        self._cpu_time = cpu_time
        self._environment = _Environment(cpu_time, today)
        self._environment.budget.deadline = cpu_time() + time_limit_s
        self._environment.budget.max_chars = max_chars
        try:
            tree = self._environment.parse(source)
            self.parts = wants_parts(tree)
            _look_at_the_clock_in_loops(tree, self._environment)
            code = self._environment.compile(tree, filename="<chat template>")
            namespace = self._environment.make_globals(None)
            self._template = self._environment.template_class.from_code(self._environment, code, namespace)
        except (TemplateError, RecursionError, SyntaxError, ValueError, OutOfBounds) as error:
            raise BadTemplate(f"the chat template does not compile: {type(error).__name__}") from None
        self.knows_developer = '"developer"' in source or "'developer'" in source

    def render(self, prompt: ChatPrompt) -> str:
        """The text of the prompt. Refused where the template refuses it, OutOfBounds where it takes too much."""
        if not self.knows_developer and any(message["role"] == "developer" for message in prompt.messages):
            raise Refused(Why.UNCERTAIN, "a developer message, which the template does not know")
        conversation = prompt.conversation(parts=self.parts)
        final: str | None = None
        if prompt.continue_final_message:
            final = self._mark_end(conversation[-1])
        variables = {
            **self._named_tokens,
            "documents": None,
            **prompt.arguments,
            "messages": conversation,
            "tools": prompt.tools,
            "add_generation_prompt": prompt.add_generation_prompt and not prompt.continue_final_message,
        }
        text = self._run(variables)
        return text if final is None else _cut_at_tag(text, final)

    def _run(self, variables: dict[str, Any]) -> str:
        budget = self._environment.budget
        budget.deadline = self._cpu_time() + self._time_limit_s
        budget.max_chars = self._max_chars
        written: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                length += len(piece)
                if length > self._max_chars:
                    raise OutOfBounds("the chat template writes too much")
                written.append(piece)
        except OutOfBounds:
            raise
        except RecursionError:
            raise OutOfBounds("the chat template calls itself without end") from None
        except MemoryError:
            raise OutOfBounds("the chat template needs too much memory") from None
        except Exception as error:  # whatever an expression of a stranger's program may raise
            raise Refused(Why.TEMPLATE, f"the chat template ended with {type(error).__name__}") from None
        return "".join(written)

    def _mark_end(self, message: dict[str, Any]) -> str:
        """Put the tag behind the message's text, so that the rendering tells where it ends; returns that text."""
        if "content" not in self._source:
            raise Refused(Why.SHAPE, "continue_final_message with a template that knows no content")
        content = message["content"]
        if isinstance(content, str):
            message["content"] = content + CONTINUE_TAG
            return content
        if not content:
            raise Refused(Why.SHAPE, "continue_final_message without a text to continue")
        text: str = content[-1]["text"]
        content[-1]["text"] = text + CONTINUE_TAG
        return text


def _cut_at_tag(text: str, final: str) -> str:
    tag = CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise Refused(Why.SHAPE, "continue_final_message, and the template changes the message")
    at = text.rindex(tag)
    if text.startswith(CONTINUE_TAG, at):
        return text[:at]
    return text[:at].rstrip()  # the template trims messages


class _Generation(Extension):
    """`{% generation %}` marks what a model has written; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, cpu_time: Callable[[], float], today: Callable[[], time.struct_time]) -> None:
        # optimized: constants would be computed while compiling, before there is a bound
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols], cache_size=0
        )
        self.budget = _Budget()
        self._cpu_time = cpu_time
        self.finalize = self._printed
        self.filters["tojson"] = self._tojson
        for name in ("pprint", "urlize", "xmlattr", "random"):
            self.filters.pop(name, None)
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: time.strftime(form, today())

    # -- what the compiled template calls

    def look(self) -> str:
        """At the clock. Put into every loop."""
        if self._cpu_time() > self.budget.deadline:
            raise OutOfBounds("the chat template takes too long", slow=True)
        return ""

    def concat_bounded(self, *values: Any) -> str:
        """`a ~ b`."""
        self._weigh(values)
        return "".join(map(str, values))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.look()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | list | tuple):
            args = __self._check_method(owner, __obj.__name__, args, kwargs)
        elif __obj is str:
            __self._weigh(args)
        return __self._fits(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator_: str, left: Any, right: Any) -> Any:
        self.look()
        if operator_ == "**":
            self._number(left)
            self._number(right, 64)
            return left**right
        if operator_ == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    self._size(len(sequence) * max(times, 0))
            return self._fits(operator.mul(left, right))
        if operator_ == "%":
            if isinstance(left, str):
                self._check_format(left, (right,))
                self._weigh((right,), len(left))
            return self._fits(left % right)
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self._size(len(left) + len(right))
        return left + right

    # -- bounds

    def _size(self, size: int) -> None:
        if size > self.budget.max_chars:
            raise OutOfBounds("the chat template builds too much")

    def _number(self, value: Any, limit: int = MAX_NUMBER) -> None:
        if isinstance(value, int) and abs(value) > limit:
            raise OutOfBounds("the chat template computes with too large a number")

    def _fits(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple | dict):
            self._size(len(value))
        elif isinstance(value, int) and value.bit_length() > 4096:
            raise OutOfBounds("the chat template computes with too large a number")
        return value

    def _weigh(self, values: Iterable[Any], size: int = 0) -> None:
        """How long all of this is once printed, shared parts counted each time."""
        waiting: list[tuple[Any, int]] = [(value, 0) for value in values]
        while waiting:
            value, depth = waiting.pop()
            size += 4
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, list | tuple | dict):
                if depth > MAX_NESTING:
                    raise OutOfBounds("the chat template prints what is nested too deeply")
                if isinstance(value, dict):
                    waiting += [(item, depth + 1) for pair in value.items() for item in pair]
                else:
                    waiting += [(item, depth + 1) for item in value]
                self._size(size + len(waiting))
            self._size(size)

    def _check_method(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        for value in (*args, *kwargs.values()):
            self._number(value)
        if isinstance(owner, str):
            if name in ("format", "format_map"):
                self._check_format(owner, (*args, *kwargs.values()))
            elif name == "join" and args:
                items = list(args[0])
                self._weigh(items, len(owner) * len(items))
                return (items, *args[1:])
            elif name == "replace" and len(args) >= 2:
                self._check_replace(owner, args[0], args[1])
            elif name == "expandtabs":
                width = args[0] if args and isinstance(args[0], int) else 8
                self._size(len(owner) + owner.count("\t") * max(width, 0))
            elif name == "translate":
                raise OutOfBounds("the chat template translates by a table")
        return args

    def _check_replace(self, text: str, old: Any, new: Any) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self._size(len(text) + text.count(old) * len(new))

    def _check_format(self, form: str, values: tuple[Any, ...]) -> None:
        if _LONG_NUMBER.search(form):
            raise OutOfBounds("the chat template formats with too large a number")
        self._weigh(values, len(form))
        total = sum(len(value) if isinstance(value, str) else 8 for value in values)
        self._size(len(form) + (form.count("{") + form.count("%")) * total)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that looks at the clock and checks what it is given; jinja2's marks on the function are kept."""
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context, before the value

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.look()
            given = [*args[passed + 1 :], *kwargs.values()]
            for value in given:
                self._number(value)
            value = args[passed] if len(args) > passed else None
            if name == "join":
                value = list(value or ())
                separator = next((item for item in given if isinstance(item, str)), "")
                self._weigh(value, len(separator) * len(value))
                args = (*args[:passed], value, *args[passed + 1 :])
            elif name in ("string", "escape", "e", "forceescape", "replace", "indent", "format", "tojson", "upper"):
                self._weigh((value,))
                if name == "replace" and len(given) >= 2:
                    self._check_replace(str(value), given[0], given[1])
                elif name == "format" and isinstance(value, str):
                    self._check_format(value, tuple(given))
                elif name == "indent":
                    width = max((v for v in given if isinstance(v, int)), default=4)
                    self._size(len(str(value)) + (str(value).count("\n") + 1) * width)
            return self._fits(function(*args, **kwargs))

        return bounded

    def _printed(self, value: Any) -> Any:
        if not isinstance(value, str):
            self._weigh((value,))
        return value

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers defines it: nothing is escaped for HTML."""
        if indent is not None:
            self._number(indent, 64)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> str:
    raise TemplateError(str(message))


def _look_at_the_clock_in_loops(tree: nodes.Template, environment: _Environment) -> None:
    for loop in tree.find_all(nodes.For):
        loop.body.insert(0, nodes.ExprStmt(_call("look", [], loop.lineno)).set_lineno(loop.lineno))
    _bound_concatenations(tree)
    tree.set_environment(environment)


def _call(method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)
    call.set_lineno(line)
    return call


def _bound_concatenations(node: nodes.Node) -> None:
    """`a ~ b` becomes a call that measures first."""
    for field, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, field, [_replaced(item) for item in value])
        else:
            setattr(node, field, _replaced(value))


def _replaced(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _bound_concatenations(value)
    return _call("concat_bounded", value.nodes, value.lineno) if isinstance(value, nodes.Concat) else value
