"""Execute a job of kind serve: run an inference server until a signal stops it.

The embedded server is in embedded/server.py. engines/launch.py builds the command lines of SGLang and vLLM. This file
must not import transformers, so that a server answers within seconds after its start.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollouts_core.embedded.gate import is_loopback
from rollouts_core.embedded.server import serve
from rollouts_core.errors import InputError
from rollouts_core.job import ServeJob
from rollouts_core.jobs.lease_service import start_lease_service
from rollouts_core.keys import API_KEY_VARIABLE, read_key
from rollouts_core.metrics import EventLog
from rollouts_core.run_directory import RunDirectory, attempt_number
from rollouts_core.system.listening import bind_port
from rollouts_core.system.parent_death import die_with_parent


def run_serve_job(job: ServeJob, directory: RunDirectory) -> None:
    """Run the embedded server until a signal stops it, or replace this process by SGLang or vLLM."""
    if job.parent_pid:
        die_with_parent(job.parent_pid)
    with EventLog(directory.events, attempt=attempt_number()) as events:
        events.write("started", kind=job.kind, pid=os.getpid())
        if job.lease_port:
            offer_renewals(job, directory)
        if not job.engine.spec.is_own:
            # Imported here, because importing the clients of SGLang and vLLM takes a second.
            from rollouts_core.engines.launch import describe_slow_engine, exec_engine

            events.warn(describe_slow_engine(job.engine, Path(job.model.model.path)))
            exec_engine(job, directory.root, api_key=engine_key(job))
        serve(
            Path(job.model.model.path),
            host=job.host,
            port=job.port,
            num_threads=job.deployment.engine_threads,
            max_running_requests=job.deployment.max_running_requests,
            name=job.served_name,
            context_length=job.context_length or None,
            api_key=engine_key(job),
        )


def offer_renewals(job: ServeJob, directory: RunDirectory) -> None:
    """Start the service by which a trainer on another node renews the engine's lease.

    Raises:
        InputError: the settings have no API key for the port, or the port is in use.
    """
    if not engine_key(job):
        raise InputError(
            f"lease_port {job.lease_port} is reachable from other machines, so it needs an API key: set "
            "engine.api_key_variable to the name of the environment variable with the key"
        )
    with bind_port(job.host, job.lease_port) as listener:
        start_lease_service(listener, str(directory.lease_file), job.engine.api_key_variable or API_KEY_VARIABLE)


def engine_key(job: ServeJob) -> str:
    """The API key that the server must require. Empty if it requires none.

    The key is in the environment variable that the settings name. If the settings name no variable, a server that other
    machines can reach requires the run's shared key.
    """
    if job.engine.api_key_variable or is_loopback(job.host):
        return read_key(job.engine.api_key_variable, "engine")
    return os.environ.get(API_KEY_VARIABLE, "")
