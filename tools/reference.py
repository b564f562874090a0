"""Texts of the reference pages, made of the code: settings, commands, public names, errors.

Not here: the site around them (documentation.py), pages that people write (docs/).

    settings   fields of the pydantic records, which the Prefect form shows too
    commands   options and help texts of the `rollouts` command
    python     signatures and docstrings of `rollouts_core.__all__`
    errors     raise statements of the user's mistakes
    sizes      estimates for three models (sizes.py)
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python
from sizes import sizes_page
from typer.main import get_command

import rollouts_core
from rollouts.flows.cli import app
from rollouts.flows.evaluate_settings import EvaluateConfig
from rollouts.flows.form import RunOptions
from rollouts.flows.retrain_settings import RetrainConfig, ScheduleConfig
from rollouts.infra.node import NODE_TYPES
from rollouts_core.config import Config

ROOT = Path(__file__).parent.parent
PACKAGES = ("rollouts_core", "infra", "tasks", "flows")
Schema = Mapping[str, Any]  # Any: JSON schema

TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "table"}
BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}

RUN_TABLES: dict[str, type[BaseModel]] = {
    "run": RunOptions,
    "retrain": RetrainConfig,
    "schedule": ScheduleConfig,
    "evaluate": EvaluateConfig,
}
"""Tables of a file for the run itself, besides the core's settings and the node."""
STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


# Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of a file of settings."""

    name: str
    """Its dotted name; empty for the top of the file, with brackets for an entry of a list."""
    record: type[BaseModel]
    defaults: BaseModel | None = None
    """The record that stands there when the file says nothing."""


def settings_page() -> str:
    """Every setting with its type, default, bounds and help text, a section per table."""
    head = """
        # Settings

        Every setting of a configuration file, a section per table. `rollouts show --all my.toml` prints them with their
        values. The column *changes* says what a setting may change:

        - **result**: another value makes another result, so the stage is trained again.
        - **length**: only the length of a training or the kept checkpoints; a resumed training may change it.
        - **nothing**: places, limits and intervals; a finished stage is reused. Files count by their content, not by
          their place.
    """
    parts = [textwrap.dedent(head).strip()]
    for table in every_table():
        parts.append(f"## {title_of(table)}\n\n{text_of(table.record.__doc__ or '')}")
        parts.append(table_of_fields(table))
    return "\n\n".join(parts) + "\n"


def every_table() -> Iterator[Table]:
    """Every table that a file may have, outer ones first."""
    yield from tables_below(Table(name="", record=Config))
    for kind, node_type in NODE_TYPES.items():
        yield from tables_below(Table(name=f'node, kind = "{kind}"', record=node_type))
    for name, record in RUN_TABLES.items():
        yield from tables_below(Table(name=name, record=record))


def tables_below(table: Table) -> Iterator[Table]:
    """A table and the tables of its fields."""
    yield table
    prefix = f"{table.name.partition(',')[0]}." if table.name else ""
    for key, field in table.record.model_fields.items():
        default = default_of(table, key)
        for is_entry, record in records_in(field.annotation):
            name = f"[{prefix}{key}]" if is_entry else prefix + key
            yield from tables_below(
                Table(name=name, record=record, defaults=default if type(default) is record else None)
            )


def default_of(table: Table, key: str) -> Any:  # Any: a value of any field
    """The value of a field that a file does not set; `PydanticUndefined` if there is none."""
    if table.defaults is not None:
        return getattr(table.defaults, key)
    return table.record.model_fields[key].get_default(call_default_factory=True, validated_data={})


def records_in(annotation: Any, is_entry: bool = False) -> Iterator[tuple[bool, type[BaseModel]]]:  # Any: a type
    """The records that a field may hold, and whether the field holds a list of them."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield is_entry, annotation
    for part in getattr(annotation, "__args__", ()):
        yield from records_in(part, is_entry or getattr(annotation, "__origin__", None) in (tuple, list))


def title_of(table: Table) -> str:
    """The heading of a table, as the file writes it."""
    if not table.name:
        return "Top of the file"
    name, comma, kind = table.name.partition(",")
    return f"`[{name}]`" + comma + (f" `{kind.strip()}`" if kind else "")


def table_of_fields(table: Table) -> str:
    """The fields of a record that hold values, as a Markdown table."""
    schema = table.record.model_json_schema()
    lines = ["| key | type | default | changes | help |", "|---|---|---|---|---|"]
    for key, field in table.record.model_fields.items():
        described = schema["properties"][key]
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        default = default_of(table, key)
        is_table = isinstance(default, BaseModel) or "$ref" in described
        shown = "" if is_table else "required" if default is PydanticUndefined else f"`{as_toml(default)}`"
        cells = (f"`{key}`", type_of(described), shown, effect_of(table, extra, is_table=is_table))
        lines.append(f"| {' | '.join(cells)} | {in_cell(field.description or '')} |")
    return "\n".join(lines)


def effect_of(table: Table, extra: Mapping[str, Any], *, is_table: bool) -> str:  # Any: JSON
    """What a setting may change, by the marks of its field."""
    is_of_training = not re.match(r"(node|run|retrain|schedule|evaluate)\b", table.name.strip("["))
    if is_table:
        return ""
    if not is_of_training or extra.get("affects_result") is False:
        return "nothing"
    return "length" if extra.get("affects_weights") is False else "result"


def type_of(schema: Schema) -> str:
    """The type of a value with its bounds, in words."""
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_of(each) for each in schema["anyOf"] if each.get("type") != "null"))
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}: " + ", ".join(type_of(each) for each in schema["prefixItems"])
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    if "$ref" in schema:
        return "table"
    bounds = [template.format(f"{schema[key]:g}") for key, template in BOUNDS.items() if key in schema]
    return ", ".join([TYPES.get(str(schema.get("type")), "any"), *bounds])


def as_toml(value: object) -> str:
    """A default as a file would write it."""
    jsonable = to_jsonable_python(value)
    if isinstance(jsonable, dict):
        pairs = ", ".join(f"{key} = {as_toml(each)}" for key, each in jsonable.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(jsonable, list):
        return f"[{', '.join(as_toml(each) for each in jsonable)}]"
    return json.dumps(jsonable, ensure_ascii=False)


# Commands


def commands_page() -> str:
    """Every command with its arguments, options and help text."""
    parts = ["# Command line", "Every command of `rollouts`. `rollouts COMMAND --help` prints the same."]
    group = get_command(app)
    panels: dict[str, list[tuple[str, Any]]] = {}  # Any: Typer's own kind of command
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        panels.setdefault(command.rich_help_panel, []).append((name, command))
    for panel, commands in panels.items():
        parts.append(f"## {panel}")
        for name, command in commands:
            parts += text_of_command(f"rollouts {name}", command)
    return "\n\n".join(parts) + "\n"


def text_of_command(name: str, command: Any) -> Iterator[str]:  # Any: Typer's own kind of command
    """A command and its subcommands: heading, usage, help text, options."""
    options = [each for each in command.params if not each.hidden]
    arguments = [each for each in options if not each.opts[0].startswith("-")]
    usage = [name, *(each.metavar or each.name.upper() for each in arguments)]
    yield f"### `{name}`"
    yield f"```text\n{' '.join(usage)}{' [OPTIONS]' if len(options) > len(arguments) else ''}\n```"
    yield text_of(command.help or "")
    rows = [f"| {shown_option(each)} | {in_cell(each.help or '')} | {shown_default(each)} |" for each in options]
    if rows:
        yield "\n".join(["| argument or option | help | default |", "|---|---|---|", *rows])
    for subname, subcommand in getattr(command, "commands", {}).items():
        yield from text_of_command(f"{name} {subname}", subcommand)


def shown_option(option: Any) -> str:  # Any: Typer's own kind of parameter
    """An option by its names, an argument by its placeholder."""
    if not option.opts[0].startswith("-"):
        return f"`{in_cell(option.metavar or option.name.upper())}`"
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def shown_default(option: Any) -> str:  # Any: Typer's own kind of parameter
    """The default of an option, and the environment variable that stands for it."""
    default = "required" if option.required else ""
    if not any(option.default is each for each in (None, "", False)) and not callable(option.default):
        default = f"`{option.default}`"
    return f"{default} (or `{option.envvar}`)".strip() if option.envvar else default


# Python


def python_page() -> str:
    """Every public name of `rollouts_core`: signature, docstring, and the public methods of a class."""
    about = (
        "Every name that `from rollouts_core import NAME` gives, in the order of the alphabet. "
        "[From Python](../library.md) uses them in one training."
    )
    parts = ["# Python", about]
    for name in sorted(rollouts_core.__all__, key=str.lower):
        parts += text_of_name(name, getattr(rollouts_core, name))
    return "\n\n".join(parts) + "\n"


def text_of_name(name: str, value: object) -> Iterator[str]:
    """A function with its signature, a class also with its fields and methods, or a constant."""
    yield f"## `{name}`"
    if inspect.isclass(value):
        yield from text_of_class(name, value)
    elif callable(value):
        yield code(f"{'async ' * inspect.iscoroutinefunction(value)}def {name}{signature_of(value)}")
        yield docstring_of(value)
    else:
        yield f"A constant: {type(value).__name__}" + (
            f" of {', '.join(f'`{key}`' for key in value)}." if isinstance(value, Mapping) else "."
        )


def text_of_class(name: str, value: type) -> Iterator[str]:
    """A class: the call that makes one unless it is a record of settings, its fields, its methods."""
    is_record = issubclass(value, BaseModel)
    yield code(f"class {name}" if is_record or inspect.isabstract(value) else f"class {name}{signature_of(value)}")
    yield docstring_of(value)
    if is_record:
        yield "A record of settings: [settings](settings.md) has its fields."
        return
    fields = dict(fields_of(value))
    if fields:
        rows = [f"| `{key}` | {in_cell(about)} |" for key, about in fields.items()]
        yield "\n".join(["| field | meaning |", "|---|---|", *rows])
    for key, method in vars(value).items():
        if key.startswith("_") or isinstance(method, type):
            continue
        function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
        if inspect.isfunction(function):
            yield f"**`{name}.{key}`**"
            yield code(f"{'async ' * inspect.iscoroutinefunction(function)}def {key}{signature_of(function)}")
            yield docstring_of(function)
        elif isinstance(method, property):
            yield f"**`{name}.{key}`** (property)"
            yield docstring_of(method)


def fields_of(value: type) -> Iterator[tuple[str, str]]:
    """The fields of a dataclass with the docstrings below them."""
    if not dataclasses.is_dataclass(value):
        return
    body = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    assert isinstance(body, ast.ClassDef), "the source of a class is a class"
    following = [*body.body[1:], None]
    for statement, after in zip(body.body, following, strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if statement.target.id.startswith("_"):
            continue
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        yield statement.target.id, inspect.cleandoc(str(after.value.value)) if is_text else ""  # type: ignore[union-attr]


def signature_of(value: Callable[..., object]) -> str:
    """The signature of a function or class, one parameter per line if it is long."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # a class without a signature of its own
        return ""
    kinds = [each.kind for each in signature.parameters.values()]
    parameters = [shown_parameter(each) for each in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = "" if inspect.isclass(value) else shown_annotation(" -> ", signature.return_annotation)
    line = f"({', '.join(parameters)}){returned}"
    return line if len(line) <= 90 else "(" + "".join(f"\n    {each}," for each in parameters) + f"\n){returned}"


def shown_parameter(parameter: inspect.Parameter) -> str:
    """A parameter with its type and default, as the code writes them."""
    stars = [each for kind, each in STARS.items() if kind is parameter.kind]
    shown = "".join(stars) + parameter.name + shown_annotation(": ", parameter.annotation)
    if parameter.default is inspect.Parameter.empty:
        return shown
    default = parameter.default
    if isinstance(default, Enum):
        return f"{shown} = {type(default).__name__}.{default.name}"
    text = repr(default)
    return f"{shown} = {'...' if '<' in text or len(text) > 60 else text}"


def shown_annotation(mark: str, annotation: Any) -> str:  # Any: a type, or its name
    """A type after its mark; nothing without a type."""
    if annotation is inspect.Signature.empty:
        return ""
    return mark + str(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def code(text: str) -> str:
    return f"```python\n{text}\n```"


def docstring_of(value: object) -> str:
    """The docstring of a function or class as Markdown, its sections as lists."""
    parts = re.split(r"^(Args|Returns|Raises|Yields):\n", inspect.getdoc(value) or "", flags=re.MULTILINE)
    shown = [text_of(parts[0])]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        end = re.search(r"^\S", body, re.MULTILINE)
        items, after = (body[: end.start()], body[end.start() :]) if end else (body, "")
        joined = re.sub(r"\n\s+(?=\S)", " ", re.sub(r"^    (?=[\w, .]+: )", "- ", items.rstrip(), flags=re.MULTILINE))
        shown.append(f"{title}:\n\n{text_of(joined)}")
        shown.append(text_of(after))
    return "\n\n".join(each for each in shown if each.strip())


# Errors


def errors_page() -> str:
    """The classes of errors with their meanings, and the sentences of each error by package and module."""
    head = """
        # Errors

        The errors of runs and commands, as the code words them. A word in ‹› stands for the value found. A
        `TransientInfraError` may pass by itself, so a run retries the stage first.

        ## Classes

        A class inherits the meaning of the class in its second column.

        | error | kind of | meaning |
        |---|---|---|
    """
    rows = [
        f"| `{kind.name}` | `{ast.unparse(kind.bases[0])}` | {in_cell(meaning_of(kind))} |"
        for kind in error_classes().values()
    ]
    parts = ["\n".join([textwrap.dedent(head).strip(), *rows])]
    for package in PACKAGES:
        parts.append(f"## {package}")
        for path in sorted((ROOT / package).rglob("*.py")):
            rows = [f"| `{kind}` | {in_cell(sentence)} |" for kind, sentence in errors_of(path)]
            if rows:
                parts.append(f"### `{path.relative_to(ROOT).as_posix()}`")
                parts.append("\n".join(["| error | sentence |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


ERROR_FILES = ("rollouts_core/errors.py", "infra/errors.py")


@cache
def error_classes() -> dict[str, ast.ClassDef]:
    """The classes of errors that end a command or a stage, by name."""
    trees = [ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in ERROR_FILES]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: node for node in classes if node.name.endswith("Error")}


def meaning_of(kind: ast.ClassDef) -> str:
    """The docstring of a class without its section of arguments."""
    return (ast.get_docstring(kind) or "").partition("\n\nArgs:")[0]


RULES = "rollouts_core/config"
"""Folder of the rules between settings, which yield sentences."""


def errors_of(path: Path) -> Iterator[tuple[str, str]]:
    """The class and the sentence of each error of the user that a file raises, or yields for settings."""
    has_rules = path.is_relative_to(ROOT / RULES)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        kind, said = "", None
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind = node.exc.func.id if isinstance(node.exc.func, ast.Name) else ""
            said = max(node.exc.args, key=lambda arg: len(sentence_of(arg)))
        elif isinstance(node, ast.Yield) and has_rules:
            kind, said = "ConfigError", node.value
        sentence = sentence_of(said) if said and kind in error_classes() else ""
        if len(re.sub("‹[^›]*›", "", sentence).split()) > 1:
            yield kind, sentence


def sentence_of(node: ast.expr) -> str:
    """The text of an expression, with names in ‹› for its values."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(sentence_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return sentence_of(node.left) + sentence_of(node.right)
    value = node.value if isinstance(node, ast.FormattedValue) else node
    names = re.findall(r"[A-Za-z_]\w+", re.sub(r"(['\"]).*?\1", "", ast.unparse(value)))
    return f"‹{names[-1].replace('_', ' ').strip() if names else 'value'}›"


# Texts


def text_of(docstring: str) -> str:
    """A docstring as Markdown: paragraphs, with drawings and code as they are."""
    text = inspect.cleandoc(docstring)
    return re.sub(r"(?<![`\w])<(?=[a-z/])", "&lt;", text)


def in_cell(text: str) -> str:
    """A text in one line, without the signs that end a cell or begin a tag."""
    line = " ".join(text.split()).replace("|", "\\|")
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(
        part if part.startswith("`") else re.sub(r"[*_]", r"\\\g<0>", part).replace("<", "&lt;") for part in parts
    )


PAGES: dict[str, Callable[[], str]] = {
    "settings": settings_page,
    "commands": commands_page,
    "python": python_page,
    "errors": errors_page,
    "sizes": sizes_page,
}
"""The pages of the reference, and the functions that write them."""
