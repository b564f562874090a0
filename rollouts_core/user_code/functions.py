"""Find the functions that settings name, either built-in or in the user's modules (`package.module:function`)."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from rollouts_core.config.messages import closest_name, first_line
from rollouts_core.errors import ConfigError
from rollouts_core.user_code.code_folders import use_code_folders
from rollouts_core.user_code.failures import describe_raised, find_user_place

OWN_PACKAGE = "rollouts_core"
IS_MISSING = "; is it beside the configuration, in the current folder, or on PYTHONPATH?"
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])  # Any: user functions of many shapes


def resolve_function(name: str | FunctionT, known: Mapping[str, FunctionT], *, setting: str) -> FunctionT:
    """Find the function that a setting names: a key of `known`, or `package.module:function`, which is imported.

    Raises:
        ConfigError: the name, module or function does not exist.
    """
    if not isinstance(name, str):
        return name
    if name in known:
        return known[name]
    module_name, colon, function_name = name.partition(":")
    if "/" in module_name or module_name.endswith(".py") or module_name.startswith("."):
        raise ConfigError(_say_no_file(name, setting=setting))
    if not colon:
        hint = closest_name(name, list(known)) if known else ""
        own = "" if hint.endswith("?") else f"{', or' if hint else ';'} give package.module:function"
        raise ConfigError(f"{setting}: unknown name {name!r}{hint}{own}")
    if not module_name:
        raise ConfigError(f"{setting}: {name!r} has no module name: give package.module:function")
    found: Any = (module := _import(module_name, setting=setting))  # Any: the object behind the name
    for part in function_name.split("."):
        is_entered = (found is module or inspect.isclass(found)) and not part.startswith("__")
        found = getattr(found, part, None) if is_entered else None
    if found is None:
        functions = [each for each, value in vars(module).items() if callable(value)]
        close = difflib.get_close_matches(function_name, functions, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{setting}: module {module_name!r} has no {function_name!r}{hint}")
    if not callable(found):
        raise ConfigError(f"{setting}: {name!r} is not a function")
    if home := find_foreign_home(found, module):
        own = module_name if module_name.startswith(f"{OWN_PACKAGE}.") else module_name.partition(".")[0]
        raise ConfigError(
            f"{setting}: {name!r} is not defined in {own} but in {home}: use its name in that package, or define your "
            "own function that calls it"
        )
    function: FunctionT = found
    return function


def find_foreign_home(found: object, module: ModuleType) -> str:
    """The module that defines an object, if that module belongs to another package than `module`, else "".

    Without this check, trusting a package would mean trusting everything that the package imports, such as `os.abort`.
    An object that another package's code made, such as a function that a decorator returned, counts as the package's
    own, unless a module of the other package also has a name for the object. An object of rollouts_core must be defined
    in the module itself.

    Args:
        module: the module through which the object was found.
    """
    is_defined = inspect.isroutine(found) or inspect.isclass(found)
    home = str(getattr(found if is_defined else type(found), "__module__", None) or "builtins")
    is_own = f"{home}.".startswith(f"{module.__name__}.")
    if is_own or _top(home) == _top(module.__name__) != OWN_PACKAGE:
        return ""
    if is_defined and "<locals>" not in getattr(found, "__qualname__", ""):
        return home
    names = vars(sys.modules[home]).values() if home in sys.modules else ()
    return home if any(each is found for each in names) else ""


def _top(module_name: str) -> str:
    return module_name.partition(".")[0]


def _say_no_file(name: str, *, setting: str) -> str:
    path, _, function_name = name.partition(":")
    module_name = path.rpartition("/")[2].removesuffix(".py").lstrip(".") or "package.module"
    return (
        f"{setting}: {name!r} is a file name or a path: give the module's name as in an import statement "
        f"({module_name}:{function_name or 'function'}), with its folder beside the configuration or in PYTHONPATH"
    )


def _import(module_name: str, *, setting: str) -> ModuleType:
    use_code_folders()
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        is_itself_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        place = "" if is_itself_missing else find_user_place(error)
        remedy = IS_MISSING if is_itself_missing else ": install the missing package, or repair the import"
        raise ConfigError(
            f"{setting}: {module_name!r} cannot be imported ({first_line(error)}){place}{remedy}"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{setting}: {module_name!r} cannot be imported: it {describe_raised(error)}") from error
