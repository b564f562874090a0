"""`rollouts credentials`: save, list and remove API keys in Prefect, and use the keys in other commands.

    rollouts credentials                                     list the saved credentials and their variables
    rollouts credentials team RUNPOD_API_KEY HF_TOKEN        save these variables of the environment
    rollouts credentials team --remove

Values are read from the environment, stored encrypted by Prefect, and never printed. This module does not import
prefect at the top, because its functions set Prefect's environment variables before the import.

Not here: the block in Prefect that holds the keys (flows/credentials.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rollouts.flows.commands.terminal import DEFAULT_STORE, AsJson, Store, console, tell
from rollouts.flows.credential_variables import check_carried
from rollouts.flows.form import CREDENTIALS_PATTERN
from rollouts.flows.own_server.lend import local_server, prefect_environment, use_prefect
from rollouts.flows.preflight import check_writable
from rollouts_core.errors import ConfigError, InputError

CredentialsName = Annotated[
    str, typer.Option("--credentials", metavar="NAME", help="Use the keys that `rollouts credentials` saved as NAME.")
]


def credentials(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Name of the credentials, for run.credentials.")] = "",
    variables: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VARIABLE]...", help="Environment variables to save."),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete the credentials.")] = False,
    store: Store = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """Save API keys in Prefect, for runs with run.credentials = NAME. Without NAME, list the saved credentials.

    rollouts credentials team RUNPOD_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY
    """
    check_request(name, variables or [], remove=remove)
    values = read_variables(variables or [])
    for variable in values:
        check_carried(name, variable)
    check_writable(store)
    with local_server(store) as address:
        use_prefect(store, address)
        if not name:
            for line in describe_credentials():
                tell(line, as_json=as_json)
        elif remove:
            remove_credentials(name)
            console.print(f"{name} was deleted", markup=False)
        else:
            held = save_credentials(name, values)
            console.print(f"saved          {name} holds {', '.join(held)}", markup=False)
            console.print(f'               [run] credentials = "{name}" uses it', markup=False)


@contextmanager
def with_credentials(name: str, store: Path, *, port: int = 0) -> Iterator[None]:
    """While the block runs, set the variables of the credentials in this process, and keep the Prefect server running.

    An empty name changes nothing.

    Raises:
        ConfigError: Prefect has no credentials with this name.
    """
    if not name:
        yield
        return
    before = dict(os.environ)
    with local_server(store, port=port) as address:
        os.environ.update(prefect_environment(store.resolve(), address))
        from rollouts.flows.credentials import take_credentials  # importing prefect reads the environment

        take_credentials(name)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def check_request(name: str, variables: Sequence[str], *, remove: bool) -> None:
    """Raise InputError for contradicting options, before a server is started."""
    if remove and (variables or not name):
        raise InputError("--remove takes a NAME and no other option")
    if name and not remove and not variables:
        raise InputError(
            f"expected the variables to save in {name}, as in: rollouts credentials {name} RUNPOD_API_KEY; "
            "without a NAME, the command lists the saved credentials"
        )
    if not re.fullmatch(CREDENTIALS_PATTERN, name):
        raise InputError(f"{name!r} is not a name for credentials: expected lower-case letters, digits and dashes")


def read_variables(variables: Sequence[str]) -> dict[str, str]:
    """Read environment variables.

    Raises:
        ConfigError: a variable is missing or empty.
    """
    for variable in variables:
        if not os.environ.get(variable):
            raise ConfigError(f"the environment has no variable {variable}, or it is empty: export it first")
    return {variable: os.environ[variable] for variable in variables}


def save_credentials(name: str, values: Mapping[str, str]) -> list[str]:
    """Add the values to the credentials in Prefect. Returns the names of all variables that the credentials hold."""
    from rollouts.flows.credentials import block_of, find_credentials

    held = {**find_credentials().get(name, {}), **values}
    block_of(held).save(name, overwrite=True)
    return sorted(held)


def remove_credentials(name: str) -> None:
    """Delete the credentials in Prefect.

    Raises:
        ConfigError: no credentials have this name.
    """
    from rollouts.flows.credentials import Credentials, find_credentials

    if name not in find_credentials():
        raise ConfigError(f"Prefect has no credentials named {name}: rollouts credentials lists the saved ones")
    Credentials.delete(name)


def describe_credentials() -> list[str]:
    """A line for each saved set of credentials: its name, and the names of its variables."""
    from rollouts.flows.credentials import find_credentials

    found = find_credentials()
    lines = [f"{name}: {', '.join(sorted(variables)) or 'empty'}" for name, variables in sorted(found.items())]
    return lines or ["there are no credentials: rollouts credentials NAME VARIABLE... saves some"]
