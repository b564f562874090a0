"""Pins that what we send, and what the tests' providers answer, is what the providers' OpenAPI documents say.

Without it the fakes and the clients could agree with each other and with nobody else.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import httpx
import pytest
from openapi_core.validation.request.exceptions import RequestBodyValidationError
from openapi_core.validation.response.exceptions import InvalidData

from rollouts.infra.cloud import Cloud
from rollouts.infra.errors import OfferGoneError, ProviderRefusedError
from rollouts.infra.offers import GPUQuery, HostKeyPair, InstanceStatus, MachineSpec
from rollouts.infra.providers import lambda_cloud, prime, runpod, shadeform, vast
from rollouts.infra.providers.lambda_cloud import Lambda
from rollouts.infra.providers.prime import Prime
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.providers.shadeform import Shadeform
from rollouts.infra.providers.vast import Vast
from tests.infra import fake_prime
from tests.infra.fake_cloud import KEY, FakeCloud
from tests.infra.fake_lambda import PRIVATE_ADDRESS, FakeLambda
from tests.infra.fake_prime import FakePrime
from tests.infra.fake_runpod import FakeRunPod
from tests.infra.fake_shadeform import FakeShadeform
from tests.infra.fake_vast import FakeVast
from tests.infra.providers.contract import ContractTransport, parse_document, read_document, specs_dir

pytestmark = pytest.mark.specs

PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKHEMZ7ibIPHlAUA0YUTIGe8rRkl5uVMl0Y1rpqCMhXi me"
QUERY = GPUQuery(gpu_types=("H100",), min_cuda="12.8")
Open = Callable[[str, httpx.BaseTransport], Cloud]

PROVIDERS: dict[str, tuple[type[FakeCloud], str, str, str, Open]] = {
    "runpod": (
        FakeRunPod,
        "runpod-rest-v2.openapi.json",
        "https://api.runpod.io",
        "",
        lambda url, transport: RunPod(KEY, url, transport),
    ),
    "lambda": (
        FakeLambda,
        "lambda.openapi.json",
        "https://cloud.lambda.ai",
        "",
        lambda url, transport: Lambda(KEY, url, transport, min_interval_s=0),
    ),
    "prime": (
        FakePrime,
        "prime-compute.openapi.yml",
        "https://api.primeintellect.ai",
        "",
        lambda url, transport: Prime(KEY, url, transport),
    ),
    "shadeform": (
        FakeShadeform,
        "shadeform.openapi.yml",
        "https://api.shadeform.ai",
        "/v1",
        lambda url, transport: Shadeform(KEY, url, transport),
    ),
    "vast": (
        FakeVast,
        "vast.openapi.yaml",
        "https://console.vast.ai",
        "",
        lambda url, transport: Vast(KEY, url, transport, min_interval_s=0),
    ),
}


@dataclass(frozen=True)
class Pair:
    """A client and the provider's fake, with the document between them."""

    fake: FakeCloud
    cloud: Cloud
    transport: ContractTransport


@pytest.fixture(params=sorted(PROVIDERS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    fake_type, document, server, base, open_cloud = PROVIDERS[request.param]
    transport = ContractTransport(read_document(specs_dir() / document), server)
    fake = fake_type()
    with fake.served() as url, open_cloud(url + base, transport) as cloud:
        yield Pair(fake, cloud, transport)


def make_spec(name: str) -> MachineSpec:
    host_key = HostKeyPair(private="-----BEGIN OPENSSH PRIVATE KEY-----\n...\n", public="ssh-ed25519 AAAA")
    return MachineSpec(name=name, public_key=PUBLIC_KEY, disk_gb=50, ends_at=2_000_000_000.0, host_key=host_key)


@pytest.mark.slow
def test_a_life_of_a_machine_is_as_the_document_says(pair: Pair) -> None:
    pair.fake.faults.boot_s = 1000.0
    offer = next(offer for offer in pair.cloud.search(QUERY) if QUERY.admits(offer))
    assert offer.vram_gb == 80 and 2 < offer.usd_per_gpu_hour < 3
    instance_id = pair.cloud.create(offer, make_spec("rollouts-x"))
    starting = pair.cloud.get(instance_id)
    assert starting is not None and starting.status is InstanceStatus.STARTING and not starting.has_address
    pair.fake.faults.boot_s = 0.0
    running = pair.cloud.get(instance_id)
    assert running is not None and running.has_address and running.host == pair.fake.host
    assert running.private_address == (PRIVATE_ADDRESS if running.provider == "lambda" else "")
    assert running.usd_per_hour == pytest.approx(offer.usd_per_hour)
    assert [each.id for each in pair.cloud.list_named("rollouts-")] == [instance_id]
    assert pair.cloud.list_named("others-") == []
    assert pair.cloud.host_key(instance_id) == ""
    pair.cloud.terminate(instance_id)
    pair.cloud.terminate(instance_id)
    gone = pair.cloud.get(instance_id)
    assert (gone is None or gone.status is InstanceStatus.GONE) and pair.fake.alive() == []
    assert len(pair.transport.seen) >= 8


def test_the_second_machine_has_the_same_key(pair: Pair) -> None:
    offer = next(offer for offer in pair.cloud.search(QUERY) if QUERY.admits(offer))
    for name in ("rollouts-1", "rollouts-2"):
        pair.cloud.create(offer, make_spec(name))
    assert len(getattr(pair.fake, "keys", [None])) == 1


def test_an_account_that_takes_no_name_twice_takes_a_second_key(pair: Pair) -> None:
    offer = next(offer for offer in pair.cloud.search(QUERY) if QUERY.admits(offer))
    pair.cloud.create(offer, make_spec("rollouts-1"))
    another = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f other"
    pair.cloud.create(offer, replace(make_spec("rollouts-2"), public_key=another))
    assert len(pair.fake.machines) == 2 and len(getattr(pair.fake, "keys", [None, None])) == 2


def test_all_pages_of_a_list_are_read(pair: Pair) -> None:
    offer = next(offer for offer in pair.cloud.search(QUERY) if QUERY.admits(offer))
    names = [f"rollouts-{number}" for number in range(5)]
    for name in names:
        pair.cloud.create(offer, make_spec(name))
    assert sorted(instance.name for instance in pair.cloud.list_named("rollouts-")) == names
    assert [instance.name for instance in pair.cloud.list_named("rollouts-4")] == names[4:]


def test_no_capacity_and_no_access_are_told_apart(pair: Pair) -> None:
    offer = next(offer for offer in pair.cloud.search(QUERY) if QUERY.admits(offer))
    pair.fake.faults.no_capacity = 1
    with pytest.raises(OfferGoneError):
        pair.cloud.create(offer, make_spec("rollouts-1"))
    pair.fake.faults.refuses_key = True
    with pytest.raises(ProviderRefusedError, match="check the key in ") as refused:
        pair.cloud.list_named("rollouts-")
    assert KEY not in str(refused.value)


def test_what_has_no_gpu_a_changing_price_or_another_money_or_is_paid_before_or_sold_out_is_no_offer_of_prime() -> None:
    with FakePrime().served() as url, Prime(KEY, url) as cloud:
        offers = cloud.search(GPUQuery())
    # a disk of 130 GB, the first of its sizes above 100; 50 are free
    assert [offer.usd_per_hour for offer in offers] == pytest.approx([2.4 + 80 * 0.0005, 0.9 + 80 * 0.0005])
    assert [offer.is_spot for offer in offers] == [False, True]
    assert [QUERY.admits(offer) for offer in offers] == [True, False]
    assert GPUQuery(gpu_types=("H100",), spot=True).admits(offers[1])


def test_a_machine_of_prime_intellect_is_offered_with_what_its_cpus_memory_and_disk_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it the highest price that is sent is below the real one, and no such machine is ever had."""
    cpus = {"minCount": 2, "defaultCount": 8, "maxCount": 24, "pricePerUnit": 0.005, "step": 2}
    memory = {"defaultCount": 64, "pricePerUnit": 0.002, "defaultIncludedInPrice": True}
    disk = {"defaultCount": 200, "pricePerUnit": 0.0005, "defaultIncludedInPrice": False}
    parts = {"vcpu": cpus | {"defaultIncludedInPrice": False}, "memory": memory, "disk": disk}
    monkeypatch.setattr(fake_prime, "CONFIGURATIONS", [fake_prime.H100 | parts])
    with FakePrime().served() as url, Prime(KEY, url) as cloud:
        [offer] = cloud.search(QUERY)
    assert offer.usd_per_hour == pytest.approx(2.4 + 8 * 0.005 + 200 * 0.0005)


@pytest.mark.parametrize(("wanted_gb", "sizes"), [(100, [110]), (110, [110]), (140, [])])
def test_a_disk_of_prime_intellect_that_lies_between_two_of_its_sizes_is_not_offered_as_the_largest(
    wanted_gb: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the machine is rented with the smallest disk, because none of the wanted size can be named."""
    disk = {"minCount": 10, "defaultCount": 10, "maxCount": 150, "step": 100, "pricePerUnit": 0.0005}
    monkeypatch.setattr(fake_prime, "CONFIGURATIONS", [fake_prime.H100 | {"disk": disk}])
    query = QUERY.model_copy(update={"disk_gb": wanted_gb})
    with FakePrime().served() as url, Prime(KEY, url) as cloud:
        assert [offer.disk_gb for offer in cloud.search(query) if query.admits(offer)] == sizes


@pytest.mark.parametrize(("wanted", "is_there"), [("eu", True), ("FI", True), ("HEL", True), ("us", False)])
def test_a_place_of_prime_intellect_is_named_by_its_region_country_or_data_center(
    wanted: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"region": "eu_north", "country": "FI", "dataCenter": "HEL-1"}
    monkeypatch.setattr(fake_prime, "CONFIGURATIONS", [fake_prime.H100 | place])
    query = QUERY.model_copy(update={"regions": (wanted,)})
    with FakePrime().served() as url, Prime(KEY, url) as cloud:
        assert [query.admits(offer) for offer in cloud.search(query)] == [is_there]


STATUSES = {
    "runpod": [("/components/schemas/PodStatus/enum", runpod.STATUS)],
    "lambda": [("/components/schemas/InstanceStatus/enum", lambda_cloud.STATUS)],
    "prime": [
        ("/components/schemas/PodStatusEnum/enum", prime.STATUS),
        ("/components/schemas/InstallationStatusEnum/enum", prime.INSTALLATION),
    ],
    "shadeform": [("/components/schemas/Instance/properties/status/enum", shadeform.STATUS)],
}
"""Where a document lists every status, and what the client makes of each."""


@pytest.mark.parametrize("provider", sorted(STATUSES))
def test_every_status_of_a_document_is_one_that_the_client_knows(provider: str) -> None:
    document = parse_document(specs_dir() / PROVIDERS[provider][1])
    for place, known in STATUSES[provider]:
        documented = functools.reduce(lambda part, key: part[key], place.strip("/").split("/"), document)
        assert len(documented) >= 5 and set(documented) <= set(known)


def test_what_vast_says_will_never_run_never_will() -> None:
    """Its document lists no statuses, and names in its introduction those that are a trap."""
    introduction = parse_document(specs_dir() / PROVIDERS["vast"][1])["info"]["description"]
    [trap] = re.findall(r"if `actual_status` becomes (.*?) it will never reach `running`", introduction)
    documented = re.findall(r"`(\w+)`", trap)
    assert len(documented) == 3
    assert all(not vast.STATUS[status].may_become_usable for status in documented)


def test_the_document_is_strict_about_what_is_sent_and_answered() -> None:
    transport = ContractTransport(read_document(specs_dir() / "runpod-rest-v2.openapi.json"), "https://api.runpod.io")
    fake = FakeRunPod()
    with fake.served() as url, httpx.Client(base_url=url, transport=transport) as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        with pytest.raises(RequestBodyValidationError):
            client.post("/v2/pods", json={"name": "x", "image": "y", "spot": True})
        fake.faults.extra_status = "MELTED"
        with RunPod(KEY, url) as cloud:
            instance_id = cloud.create(cloud.search(QUERY)[0], make_spec("rollouts-1"))
            melted = cloud.get(instance_id)
        assert melted is not None and melted.status is InstanceStatus.UNKNOWN and not melted.has_address
        with pytest.raises(InvalidData):
            client.get(f"/v2/pods/{instance_id}")
