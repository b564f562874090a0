"""The commands about rented machines: list offers and rented machines, and end machines that no run uses.

    rollouts gpus       list GPU offers of all providers whose API keys are in the environment, cheapest first
    rollouts nodes      list the machines that the store has rented; `show`, `ssh` and `release` act on one machine
    rollouts reap       end machines that no running run uses

Not here: the other commands (cli.py), renting a machine (infra/renting/provision.py).
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from rollouts.flows.commands.credentials import CredentialsName, with_credentials
from rollouts.flows.commands.terminal import DEFAULT_STORE, AsJson, emit, tell
from rollouts.flows.expired_machines import looked_for
from rollouts.flows.store import STORE_VARIABLE, from_home
from rollouts.infra.cloud import Cloud, look_up
from rollouts.infra.clouds import CloudName, cloud_names, explain_reached_through, find_cloud
from rollouts.infra.errors import InfraError, PermanentInfraError, TransientInfraError
from rollouts.infra.foreign_text import shown_line, shown_lines
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.offers import (
    CUDA_PATTERN,
    GPUQuery,
    InstanceStatus,
    Offer,
    Offered,
    describe_closest,
)
from rollouts.infra.providers.clouds import (
    account_of,
    clouds_with_keys,
    open_clouds,
    open_usable_clouds,
    require_keys,
)
from rollouts.infra.providers.instance import find_instance
from rollouts.infra.providers.rented import known_hosts_of
from rollouts.infra.renting.reaper import ReapReport, reap, release_named
from rollouts.infra.renting.rentals import (
    NAME_PREFIX,
    Rental,
    all_rentals,
    describe_keeping,
    find_rental,
    in_utc,
    open_rentals,
)
from rollouts_core.config.messages import closest_choice, reason_of
from rollouts_core.errors import ConfigError, InputError

Explained = Callable[[Callable[..., None]], Callable[..., None]]

Store = Annotated[
    Path, typer.Option(envvar=STORE_VARIABLE, callback=from_home, help="Folder with the ledger of the rented machines.")
]
MachineName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the machine, as `rollouts nodes` shows it.")]


def add_machine_commands(app: typer.Typer, explained: Explained, *, panel: str) -> None:
    """Add `gpus`, `nodes` and `reap` to the command line.

    Args:
        explained: decorator that turns an expected exception of a command into one printed sentence.
        panel: the section of the help that lists these commands.
    """
    nodes = typer.Typer(help="The machines that this store has rented, and their cost.", no_args_is_help=False)
    app.command(rich_help_panel=panel)(explained(gpus))
    listed = list_unless_asked(explained)
    app.add_typer(nodes, name="nodes", invoke_without_command=True, callback=listed, rich_help_panel=panel)
    nodes.command()(explained(show))
    nodes.command(context_settings={"ignore_unknown_options": True})(explained(ssh))
    nodes.command()(explained(release))
    app.command("reap", rich_help_panel=panel)(explained(reap_now))


UNKNOWN_MACHINE = "the ledger knows no machine {name}: `rollouts nodes --all` lists its machines"


OPTIONS = {
    "gpu_types": "--gpu",
    "gpu_count": "--count",
    "min_vram_gb": "--min-vram",
    "max_usd_per_gpu_hour": "--max-price",
    "disk_gb": "--disk",
    "regions": "--region",
    "security": "--community",
    "spot": "--spot",
}
"""The option of `rollouts gpus` for each field of `GPUQuery`."""


# ── offers ──


def gpus(
    gpu: Annotated[list[str] | None, typer.Option(help="Type of GPU, for example H100 or RTX4090. Repeatable.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of GPUs of the machine.")] = 1,
    min_vram: Annotated[float, typer.Option(min=0, help="Least memory of each GPU, GB.")] = 0.0,
    max_price: Annotated[float, typer.Option(min=0.01, help="Highest price, US dollars per GPU and hour.")] = 1000.0,
    disk: Annotated[int, typer.Option(min=1, help="Least disk space, GB.")] = 1,
    region: Annotated[list[str] | None, typer.Option(help="Beginning of a region's name. Repeatable.")] = None,
    community: Annotated[bool, typer.Option("--community", help="Also list machines of private hosts.")] = False,
    spot: Annotated[
        bool, typer.Option("--spot", help="Only machines that the provider may take back at any time.")
    ] = False,
    min_cuda: Annotated[str, typer.Option(help="Lowest CUDA version of the driver, for example 12.8.")] = "",
    provider: Annotated[
        list[str] | None, typer.Option(help=f"Only this provider: {', '.join(cloud_names())}. Repeatable.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many offers to show.")] = 30,
    credentials: CredentialsName = "",
    store: Store = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """List the GPU offers of all providers whose API keys are in the environment, cheapest first."""
    query = build_query(
        gpu_types=tuple(gpu or ()),
        gpu_count=count,
        min_vram_gb=min_vram,
        max_usd_per_gpu_hour=max_price,
        disk_gb=disk,
        regions=tuple(region or ()),
        security="any" if community else "secure",
        spot=spot,
        min_cuda=check_version(min_cuda),
        providers=check_providers(provider or []),
    )
    with with_credentials(credentials, store):
        names = require_keys(query.providers)
        with open_clouds(names) as clouds:
            offered, failures = search_in_parallel(query, clouds)
    offers = offered.fitting
    if as_json:
        emit({"kind": "offer", **asdict(offer)} for offer in offers[:limit])
    elif offers:
        typer.echo(render_offers(offers[:limit]))
    if len(offers) > limit:
        typer.echo(f"and {len(offers) - limit} more: --limit shows them", err=as_json)
    others = clouds_with_keys(query.providers)[1]
    if others:
        endpoints = [find_cloud(name).endpoint for name in others]
        variables = ", ".join(f"{endpoint.title} ({endpoint.key_variable})" for endpoint in endpoints)
        typer.echo(f"not searched, because the API key is missing: {variables}", err=as_json)
    for failure in failures:
        typer.echo(shown_lines(failure), err=True)
    if len(failures) == len(names):
        raise TransientInfraError("no provider answered")
    if not offers:
        closest = describe_closest(query, offered.others, OPTIONS.__getitem__)
        typer.echo(f"no offer matches: {closest}", err=as_json)


def build_query(**fields: Any) -> GPUQuery:  # Any: values of every type
    """Make a query with these fields.

    Raises:
        InputError: a value is invalid. The error names the command's option for the invalid field.
    """
    try:
        return GPUQuery(**fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = str(problem["loc"][0])
        raise InputError(f"{OPTIONS[field]}: {reason_of(problem)}") from error


def search_in_parallel(query: GPUQuery, clouds: dict[CloudName, Cloud]) -> tuple[Offered, list[str]]:
    """Search all providers. Returns the offers, sorted by the price per GPU, and a sentence per failed provider."""

    def search(cloud: Cloud) -> list[Offer] | str:
        try:
            return cloud.search(query)
        except InfraError as error:
            return str(error)

    with ThreadPoolExecutor(max_workers=len(clouds)) as pool:
        answers = list(pool.map(search, clouds.values()))
    offers = [offer for answer in answers if isinstance(answer, list) for offer in answer]
    fitting = [offer for offer in offers if query.admits(offer)]
    offered = Offered(
        fitting=sorted(fitting, key=lambda offer: offer.usd_per_gpu_hour),
        others=[offer for offer in offers if not query.admits(offer)],
    )
    return offered, [each for each in answers if isinstance(each, str)]


def render_offers(offers: Sequence[Offer]) -> str:
    head = ("USD/GPU/h", "USD/h", "GPUS", "GB EACH", "PROVIDER", "REGION", "WHERE")
    rows = [
        (
            "?" if offer.is_unpriced else f"{offer.usd_per_gpu_hour:.2f}",
            "?" if offer.is_unpriced else f"{offer.usd_per_hour:.2f}",
            offer.gpus,
            f"{offer.vram_gb:.0f}" if offer.vram_gb else "?",
            offer.provider,
            offer.region or "any",
            "data center" if offer.is_secure else "private",
        )
        for offer in offers
    ]
    return render_table(head, rows)


def check_providers(given: Sequence[str]) -> tuple[CloudName, ...]:
    """The providers that the user named, or all providers if the user named none."""
    for name in given:
        if name not in cloud_names():
            if explained := explain_reached_through(name):
                raise InputError(f"--provider: {explained}")
            hint = closest_choice(name, cloud_names())
            raise InputError(f"there is no provider {name}: choose one of {', '.join(cloud_names())}{hint}")
    return tuple(given) or cloud_names()


def check_version(given: str) -> str:
    """Check that a text is empty or a CUDA version such as 12.8, and return it."""
    if not re.fullmatch(CUDA_PATTERN, given):
        raise InputError(f"--min-cuda {given} is not a version: give it as 12.8")
    return given


# ── rented machines ──


def list_unless_asked(explained: Explained) -> Callable[..., None]:
    """Return the function for `rollouts nodes` without a subcommand, which lists the machines."""

    @explained
    def listed(store: Path, everything: bool, as_json: bool) -> None:
        list_nodes(store, everything=everything, as_json=as_json)

    def callback(
        context: typer.Context,
        store: Store = DEFAULT_STORE,
        everything: Annotated[bool, typer.Option("--all", help="Also list machines that are gone.")] = False,
        as_json: AsJson = False,
    ) -> None:
        if context.invoked_subcommand is None:
            listed(store, everything, as_json)

    return callback


def list_nodes(store: Path, *, everything: bool, as_json: bool) -> None:
    """Print the machines in the ledger. Without --json, also print machines that providers report and the ledger
    lacks."""
    with open_ledger(store) as ledger:
        rentals = all_rentals(ledger) if everything else open_rentals(ledger)
        now = time.time()
        if as_json:
            emit({"kind": "machine", **asdict(rental), "usd": rental.usd(now)} for rental in rentals)
            return
        typer.echo(render_rentals(rentals, now) if rentals else "nothing is rented according to the ledger")
        total_usd = sum(rental.usd(now) for rental in all_rentals(ledger))
        typer.echo(f"spent by this store so far: {total_usd:.2f} USD")
        known = {rental.name: rental for rental in all_rentals(ledger)}
        with open_usable_clouds(clouds_with_keys(cloud_names())[0]) as (clouds, problems):
            for problem in problems:
                typer.echo(shown_lines(problem), err=True)
            for cloud in clouds.values():
                try:
                    instances = cloud.list_named(NAME_PREFIX)
                except InfraError as error:
                    typer.echo(shown_lines(str(error)), err=True)
                    continue
                for instance in instances:
                    rental = known.get(instance.name)
                    if instance.status is InstanceStatus.GONE or (rental is not None and not rental.state.is_over):
                        continue
                    found = f"{shown_line(instance.name)} at {instance.provider}, {instance.status.value}"
                    if rental is None:
                        typer.echo(f"not rented by this store: {found}")
                    else:  # the provider created the machine after this store had given up the request
                        typer.echo(f"request given up, but it exists: {found}: `rollouts reap` ends it")


def show(name: MachineName, store: Store = DEFAULT_STORE) -> None:
    """Print everything about a machine: its entry in the ledger and its state at the provider."""
    with open_ledger(store) as ledger:
        rental = find_rental(ledger, name)
    if rental is None:
        raise InputError(UNKNOWN_MACHINE.format(name=name))
    facts = {
        "name": rental.name,
        "run": rental.run_id,
        "machine": f"{rental.gpu} at {rental.provider}{', ' + rental.region if rental.region else ''}",
        "id": rental.instance_id or "not known",
        "credentials": rental.credentials or "keys of the environment",
        "state": rental.state.value,
        "price": f"{rental.usd_per_hour:.2f} USD/h",
        "cost so far": f"{rental.usd(time.time()):.2f} USD",
        "asked for": in_utc(rental.intended_at),
        "ends": in_utc(rental.ended_at or rental.ends_at),
        "host key": f"{rental.host_key} ({rental.believed_by})" if rental.host_key else "not known",
        "note": note_of(rental) or "-",
    }
    echo_facts(facts)  # printed first, because the provider may not answer
    if rental.instance_id and (rental.credentials or rental.provider in clouds_with_keys(cloud_names())[0]):
        with with_credentials(rental.credentials, store), account_of(rental) as cloud:
            instance = look_up(cloud, rental.instance_id, rental.name)
        echo_facts({"provider says": "the machine is gone" if instance is None else instance.status.value})
        if instance is not None and instance.has_address:
            is_behind = bool(instance.proxy_jump)  # the address is only valid from the jump host
            login = f"ssh -p {instance.port} {instance.user}@{instance.host}"
            echo_facts({"login": f"rollouts nodes ssh {rental.name}" if is_behind else login})


def echo_facts(facts: Mapping[str, object]) -> None:
    """Print each name with its value on a line."""
    typer.echo("\n".join(f"{name:14} {shown_lines(str(value))}" for name, value in facts.items()))


def ssh(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name in `rollouts nodes`, or PROVIDER:ID of a machine that you rented."),
    ],
    command: Annotated[list[str] | None, typer.Argument(help="Command to run there in place of a shell.")] = None,
    key_file: Annotated[
        str, typer.Option(metavar="FILE", help="Private key to log in with; default: the keys of your ssh.")
    ] = "",
    store: Store = DEFAULT_STORE,
) -> None:
    """Log in to a machine with your own ssh, at its current address. The machine must have the host key that a run
    recorded."""
    from rollouts.infra.ssh.openssh import login_command  # loads paramiko

    if ":" in name:
        instance = find_instance(name)
    else:
        with open_ledger(store) as ledger:
            rental = find_rental(ledger, name)
        if rental is None:
            raise InputError(UNKNOWN_MACHINE.format(name=name))
        if not rental.instance_id:
            raise InputError(f"{name} is {rental.state}: the provider has not confirmed the machine")
        with with_credentials(rental.credentials, store), account_of(rental) as cloud:
            found = look_up(cloud, rental.instance_id, rental.name)
        if found is None or not found.has_address:
            raise InputError(f"{name} is {found.status if found else 'gone'}: login is not possible")
        instance = found
    words = login_command(instance, known_hosts_of(store, name), key_file=key_file, command=command or ())
    sys.stdout.flush()
    os.execvp(words[0], words)


def release(name: MachineName, store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """End a machine, even if a run uses it, and wait until the provider has deleted it."""
    with open_ledger(store) as ledger:
        rental = find_rental(ledger, name)
        with (
            with_credentials(rental.credentials if rental else "", store),
            open_clouds([rental.provider] if rental and not rental.state.is_over else []) as clouds,
        ):
            gone = release_named(name, ledger, clouds)
    tell(f"{gone.name} is {gone.state.value}; it cost {gone.usd(time.time()):.2f} USD", as_json=as_json)


def reap_now(
    store: Store = DEFAULT_STORE,
    spare: Annotated[
        bool,
        typer.Option(
            "--spare", help="Keep machines of killed runs for a restart of the run, until shortly before they expire."
        ),
    ] = False,
    other_store: Annotated[
        str, typer.Option(metavar="ID", help="Also end the machines of a deleted store with this id.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """End every rented machine of this store that no running run uses, and print the machines that remain.

    A failed run can keep its machine for some time (node.keep_on_failure_minutes). `rollouts nodes release` ends such
    a machine earlier.
    """
    # The machines of a deleted store are in no ledger. Any other store, even an empty one, can end them.
    with Ledger(store / LEDGER_FILE) if other_store else open_ledger(store) as ledger:
        named = sorted({rental.credentials for rental in looked_for(ledger)} - {""})
        providers = clouds_with_keys(cloud_names())[0] if named else require_keys(cloud_names())
        with open_usable_clouds(providers) as (clouds, problems):
            report = reap(ledger, clouds, spare=spare, other_ledger=other_store)
        report.failures += problems
        for name in named:
            report.add(reap_with(name, store, ledger, spare=spare))
    for title, lines in (("ended", report.ended), ("kept", report.kept), ("another store's", report.foreign)):
        for line in lines:
            if as_json:
                emit([{"kind": "checked_machine", "outcome": title, "message": shown_line(line)}])
            else:
                typer.echo(f"{title:16} {shown_line(line)}")
    for line in report.failures:
        typer.echo(shown_line(line), err=True)
    if report.failures:
        raise TransientInfraError("some machines could not be checked or ended: run the same command again")
    tell(f"{len(report.ended)} ended, {len(report.kept)} kept", as_json=as_json)


def reap_with(credentials: str, store: Path, ledger: Ledger, *, spare: bool) -> ReapReport:
    """End machines that were rented with these credentials and that no run uses."""
    try:
        with (
            with_credentials(credentials, store),
            open_usable_clouds(clouds_with_keys(cloud_names())[0]) as (clouds, problems),
        ):
            report = reap(ledger, clouds, spare=spare, credentials=credentials)
        report.failures += problems
        return report
    except ConfigError as error:
        return ReapReport(failures=[f"machines rented with the credentials {credentials} cannot be checked: {error}"])


def open_ledger(store: Path, *, nothing: str = "it has rented nothing") -> Ledger:
    """Open the ledger of a store.

    Args:
        nothing: for the error message, the probable reason why the store has no ledger.

    Raises:
        PermanentInfraError: the store has no ledger.
    """
    path = store / LEDGER_FILE
    if not path.exists():
        raise PermanentInfraError(f"{store} has no ledger: {nothing}, or --store should name another folder")
    return Ledger(path)


def render_rentals(rentals: Sequence[Rental], now: float) -> str:
    head = ("NAME", "STATE", "GPUS", "PROVIDER", "USD/h", "USD", "ENDS (UTC)", "NOTE")
    rows = [
        (
            rental.name,
            rental.state.value,
            rental.gpu,
            rental.provider,
            f"{rental.usd_per_hour:.2f}",
            f"{rental.usd(now):.2f}",
            at(rental.ended_at or rental.ends_at),
            note_of(rental)[:80],
        )
        for rental in rentals
    ]
    return render_table(head, rows)


def note_of(rental: Rental) -> str:
    """A sentence about the last event of a machine."""
    return describe_keeping(rental) or rental.note


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with aligned columns. Line breaks in cells are escaped, so that each row is one line."""
    cells = [[shown_line(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def at(seconds: float) -> str:
    """Format a time in UTC. A table's head must name UTC, because other commands print local times."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))
