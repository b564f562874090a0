"""Credentials as blocks of Prefect: environment variables for the process of each run that names the block.

    Blocks in the UI, or `rollouts credentials` ──> block rollouts-credentials/team, encrypted
    run.credentials = "team" ──> environment of the run's process ──> readers of RUNPOD_API_KEY, AWS_..., and so on

Values are never parameters of a run, so they are not shown, logged or stored with the run. Another process that acts
for a run, for example to end its machine, is started with the same credentials. Not here: the readers of the variables
(infra/providers/clouds.py, infra/ssh/login_keys.py, infra/stores/object_store.py, rollouts_core/keys.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.types import SecretDict
from pydantic import Field, SecretStr, create_model

from rollouts.flows.credential_variables import check_carried
from rollouts.infra.clouds import cloud_names, find_cloud
from rollouts.infra.errors import TransientInfraError
from rollouts.infra.foreign_text import shown_line
from rollouts.infra.providers.clouds import CREDENTIALS_VARIABLE
from rollouts_core.errors import ConfigError

TYPE_NAME, TYPE_SLUG = "Rollouts credentials", "rollouts-credentials"
NOTHING = SecretStr("")


def _key_fields() -> dict[str, Any]:  # Any: arguments of pydantic
    """The fields of the block for API keys, one per provider with an API."""
    endpoints = [find_cloud(name).endpoint for name in cloud_names()]
    return {
        endpoint.key_variable.lower(): (SecretStr, Field(NOTHING, title=f"{endpoint.title} API key"))
        for endpoint in endpoints
        if endpoint.url
    }


class Credentials(create_model("ProviderKeys", __base__=Block, **_key_fields())):  # type: ignore[misc]  # made from rows
    """API keys for runs with `run.credentials`. Leave unneeded fields empty."""

    _block_type_name = TYPE_NAME
    _block_type_slug = TYPE_SLUG
    _description = "API keys of providers, machines and object stores for runs of rollouts."

    rollouts_ssh_key: SecretStr = Field(
        NOTHING,
        title="SSH private key",
        description="Without passphrase, from -----BEGIN to END-----. Used by runs with node.key_variable = "
        "ROLLOUTS_SSH_KEY.",
    )
    hf_token: SecretStr = Field(NOTHING, title="Hugging Face token", description="For datasets and models of the hub.")
    aws_access_key_id: SecretStr = Field(NOTHING, title="S3 access key", description="For s3:// URLs.")
    aws_secret_access_key: SecretStr = Field(NOTHING, title="S3 secret key")
    aws_endpoint_url: SecretStr = Field(
        NOTHING, title="S3 endpoint URL", description="For a service other than Amazon S3."
    )
    aws_default_region: SecretStr = Field(NOTHING, title="S3 region")
    more: SecretDict = Field(
        SecretDict({}),
        title="More variables",
        description='Other variables, for settings such as api_key_variable: {"JUDGE_KEY": "..."}.',
    )


FIELDS = {name.upper(): name for name, field in Credentials.model_fields.items() if field.annotation is SecretStr}
"""The fields of the block, by the names of their environment variables."""


def take_credentials(name: str) -> None:
    """Set the variables of the credentials in the environment of this process. An empty name changes nothing.

    Raises:
        ConfigError: no credentials have this name, or a variable in the credentials is not allowed.
        TransientInfraError: Prefect does not answer.
    """
    if name:
        os.environ.update(variables_of(name))


def variables_of(name: str) -> dict[str, str]:
    """The environment variables in the credentials, and CREDENTIALS_VARIABLE with the name of the credentials.

    Raises:
        ConfigError: no credentials have this name, or a variable in the credentials is not allowed.
    """
    if (variables := find_credentials().get(name)) is None:
        raise ConfigError(
            f"Prefect has no credentials named {name}: save them in the UI under Blocks, as {TYPE_NAME}, or by "
            f"rollouts credentials {name} VARIABLE..."
        )
    for variable in variables:
        check_carried(name, variable)
    return {**variables, CREDENTIALS_VARIABLE: name}


def find_credentials() -> dict[str, dict[str, str]]:
    """The environment variables in all saved credentials, by the names of the credentials.

    Blocks are read as JSON, because Prefect would send an event for each loaded block object.

    Raises:
        TransientInfraError: Prefect does not answer.
    """
    try:
        with get_client(sync_client=True) as client:
            found = client.read_block_documents_by_type(TYPE_SLUG)
    except PrefectHTTPStatusError as error:
        if error.response.status_code == httpx.codes.NOT_FOUND:
            return {}  # this server never had credentials
        raise TransientInfraError(
            f"Prefect refused to return the credentials: status {error.response.status_code}"
        ) from error
    except httpx.HTTPError as error:
        raise TransientInfraError(f"Prefect does not answer: {error}") from error
    return {each.name: variables_in(each.data) for each in found if each.name}


def variables_in(content: dict[str, Any]) -> dict[str, str]:  # Any: JSON
    """The nonempty environment variables in the content of a block."""
    held = {variable: content.get(name) for variable, name in FIELDS.items()} | (content.get("more") or {})
    return {name: str(value) for name, value in held.items() if value}


def block_of(variables: Mapping[str, str]) -> Credentials:
    """Make a block with these environment variables."""
    fields = {name: SecretStr(variables.get(variable, "")) for variable, name in FIELDS.items()}
    more = {variable: value for variable, value in variables.items() if variable not in FIELDS}
    return Credentials(**fields, more=SecretDict(more))


def run_with_credentials(name: str, module: str, arguments: Sequence[str] = ()) -> str:
    """Run a module of this project in a child process with the credentials, and return its output.

    Raises:
        ConfigError: no credentials have this name, or a variable in the credentials is not allowed.
        TransientInfraError: the child process failed. The error has the last line of the child's output.
    """
    environment = {**os.environ, **variables_of(name)}
    command = [sys.executable, "-P", "-m", module, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = shown_line(ended.stderr.strip().rpartition("\n")[2])
        raise TransientInfraError(f"{module} ended with code {ended.returncode}: {said or 'without a message'}")
    return ended.stdout
