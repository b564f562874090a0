"""Pins that whatever a provider's OpenAPI document lets it answer is read, or refused in a sentence with the field.

Without it the first machine of a kind, a status or a null that our own fakes never show is a traceback while something
costs money.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollouts.infra.cloud import Cloud
from rollouts.infra.clouds import CloudName, find_cloud
from rollouts.infra.errors import InfraError
from rollouts.infra.offers import GPUQuery, Instance, MachineSpec, Offer, describe_closest
from rollouts.infra.providers.rented import describe_offer
from tests.infra.fake_cloud import FakeCloud
from tests.infra.providers.answers import Answer, make_answers, schemas_of
from tests.infra.providers.contract import ContractTransport, parse_document, read_document, specs_dir
from tests.infra.providers.test_cloud_contracts import PROVIDERS, PUBLIC_KEY, QUERY

ANY = GPUQuery(security="any", max_usd_per_gpu_hour=1e9, disk_gb=1)
SPEC = MachineSpec(name="rollouts-x", public_key=PUBLIC_KEY, disk_gb=50, ends_at=2_000_000_000.0)
Call = Callable[[Cloud, Offer], object]


def an_id(cloud: Cloud) -> str:
    """One that the provider's document admits."""
    return "1" if cloud.name == "vast" else "00000000-0000-4000-8000-000000000001"


def search(cloud: Cloud, offer: Offer) -> object:
    return cloud.search(ANY)


def create(cloud: Cloud, offer: Offer) -> object:
    return cloud.create(offer, SPEC)


def get(cloud: Cloud, offer: Offer) -> object:
    return cloud.get(an_id(cloud))


def list_all(cloud: Cloud, offer: Offer) -> object:
    return cloud.list_named("")


def terminate(cloud: Cloud, offer: Offer) -> None:
    cloud.terminate(an_id(cloud))


CALLS: dict[CloudName, dict[str, Call]] = {
    "runpod": {
        "GET /v2/catalog/gpus": search,
        "POST /v2/pods": create,
        "GET /v2/pods/{id}": get,
        "GET /v2/pods": list_all,
        "DELETE /v2/pods/{id}": terminate,
    },
    "lambda": {
        "GET /api/v1/instance-types": search,
        "GET /api/v1/ssh-keys": create,
        "POST /api/v1/ssh-keys": create,
        "POST /api/v1/instance-operations/launch": create,
        "GET /api/v1/instances/{id}": get,
        "GET /api/v1/instances": list_all,
        "POST /api/v1/instance-operations/terminate": terminate,
    },
    "prime": {
        "GET /api/v1/availability/gpus": search,
        "GET /api/v1/ssh_keys/": create,
        "POST /api/v1/ssh_keys/": create,
        "POST /api/v1/pods/": create,
        "GET /api/v1/pods/{pod_id}": get,
        "GET /api/v1/pods/": list_all,
        "DELETE /api/v1/pods/{pod_id}": terminate,
    },
    "shadeform": {
        "GET /instances/types": search,
        "GET /sshkeys": create,
        "POST /sshkeys/add": create,
        "POST /instances/create": create,
        "GET /instances/{id}/info": get,
        "GET /instances": list_all,
        "POST /instances/{id}/delete": terminate,
    },
    "vast": {
        "POST /api/v0/bundles": search,
        "PUT /api/v0/asks/{id}": create,
        "GET /api/v1/instances": list_all,
        "DELETE /api/v0/instances/{id}": terminate,
    },
}
"""What we ask for, as the documents write it, and what asks for it."""
SENTENCE = re.compile(r"unreadable answer \([\w.-]+: | with 4\d\d\b|its list is incomplete|is its address right")
"""How an answer is refused: the field in it, or what the provider itself refuses."""
OPERATIONS = [(provider, operation) for provider, calls in CALLS.items() for operation in calls]


@dataclass(kw_only=True)
class Answering:
    """Stands in front of a fake and answers one kind of request, once, with what it is given."""

    fake: FakeCloud
    method: str
    path: re.Pattern[str]
    content: bytes | None = None
    status: int = 200
    kind: str = ""

    async def front(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        is_asked = request.method == self.method and self.path.fullmatch(request.url.path)
        if self.content is None or not is_asked:
            await FakeCloud.front(self.fake, scope, receive, send)
            return
        content, self.content = self.content, None
        await Response(content, self.status, media_type=self.kind)(scope, receive, send)

    def problem(self, answer: Answer, call: Callable[[], object], title: str) -> str:
        """What is wrong with how an answer was taken; empty where nothing is."""
        self.content = json.dumps(answer.content).encode()
        try:
            use(call())
        except InfraError as error:
            return "" if title in str(error) and SENTENCE.search(str(error)) else f"says only: {error}"
        except Exception as error:  # noqa: BLE001  # whatever comes is what is looked for
            return f"{type(error).__name__}: {error}"
        return "" if self.content is None else "it was not asked for"


def path_pattern(base: str, path: str) -> re.Pattern[str]:
    """The paths that a document writes so; some documents leave out the slash at the end."""
    parts = re.split(r"\{\w+\}", base + path.rstrip("/"))
    return re.compile("[^/]+".join(map(re.escape, parts)) + "/?")


def use(found: object) -> None:
    """Do with what was found what everybody does."""
    rows = found if isinstance(found, Sequence) else [found]
    offers = [row for row in rows if isinstance(row, Offer)]
    for offer in offers:
        ANY.admits(offer)
        describe_offer(offer)
    describe_closest(QUERY, offers, str)
    assert all(row.port in range(1, 65536) for row in rows if isinstance(row, Instance))


@pytest.mark.specs
@pytest.mark.slow
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("provider", "operation"), OPERATIONS)
def test_whatever_a_document_admits_is_read_or_refused_in_a_sentence(
    provider: CloudName, operation: str, step: int
) -> None:
    """Each `step`-th of the answers."""
    fake_type, file_name, server, base, open_cloud = PROVIDERS[provider]
    method, _, path = operation.partition(" ")
    document, call, title = (
        parse_document(specs_dir() / file_name),
        CALLS[provider][operation],
        find_cloud(provider).endpoint.title,
    )
    fake = fake_type()
    answering = Answering(fake=fake, method=method, path=path_pattern(base, path))
    fake.front = answering.front  # type: ignore[method-assign]
    strict, lax = ContractTransport(read_document(specs_dir() / file_name), server), httpx.HTTPTransport()
    problems = []
    with fake.served() as url, open_cloud(url + base, strict) as checked, open_cloud(url + base, lax) as unchecked:
        offer = checked.search(QUERY)[0]
        for answering.status, answering.kind, schema in schemas_of(document, method, path):
            for answer in islice(make_answers(document, schema), 0, None, step):
                cloud = checked if answer.is_admitted else unchecked
                if problem := answering.problem(answer, partial(call, cloud, offer), title):
                    problems.append(f"{answering.status} {answer.title}: {problem}")
    assert problems == []


@pytest.mark.parametrize("provider", CALLS)
def test_whatever_we_ask_for_is_among_these_operations(provider: CloudName) -> None:
    fake_type, _, _, base, open_cloud = PROVIDERS[provider]
    fake = fake_type()
    patterns = [
        (method, path_pattern(base, path)) for method, _, path in (each.partition(" ") for each in CALLS[provider])
    ]
    with fake.served() as url, open_cloud(url + base, httpx.HTTPTransport()) as cloud:
        offer = cloud.search(QUERY)[0]
        instance_id = cloud.create(offer, SPEC)
        cloud.get(instance_id)
        cloud.list_named("")
        cloud.terminate(instance_id)
    asked = set(fake.requests)
    assert all(any(method == its and path.fullmatch(where) for its, path in patterns) for method, where in asked)
    assert all(any(method == its and path.fullmatch(where) for method, where in asked) for its, path in patterns)
