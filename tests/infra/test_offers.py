"""Pins which offers a query admits, and how GPUs are recognised by name.

Without it a machine could be rented that is too dear, too small, or somebody's living room.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rollouts.flows.commands.machines import OPTIONS
from rollouts.infra.offers import GPUQuery, Offer, describe_closest, is_gpu_type, is_same_model

OFFER = Offer(
    provider="runpod",
    id="SECURE:H100",
    gpu_type="NVIDIA H100 80GB HBM3",
    gpu_count=2,
    vram_gb=80,
    usd_per_hour=5.0,
    region="EU-RO-1",
)
QUERY = GPUQuery(gpu_types=("h100",), gpu_count=2, max_usd_per_gpu_hour=2.5, regions=("eu",))


@pytest.mark.parametrize(
    ("name", "wanted", "is_it"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX4090", True),
        ("RTX_4090", "rtx 4090", True),
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("H100 (80 GB PCIe)", "H100 PCIe", True),
        ("A100_80G", "A100", True),
        ("RTX 6000Ada", "RTX 6000 Ada", True),
        ("RTX6000Ada_48GB", "RTX 6000 Ada", True),
        ("RTX3080Ti_12GB", "RTX 3080 Ti", True),
        ("A100 (80 GB SXM4)", "A100 80GB", True),
        ("A100-80GB", "A100 80 GB", True),
        ("A100_40GB", "A100 80GB", False),
        ("RTX 4090D", "RTX 4090", False),
        ("NVIDIA RTX 6000 Ada", "RTX A6000", False),
        ("RTX3080_10GB", "GB10", False),
        ("NVIDIA L40", "L4", False),
        ("NVIDIA L40S", "L40", False),
        ("NVIDIA GH200", "H200", False),
        ("NVIDIA RTX A1000", "A100", False),
    ],
)
def test_a_gpu_is_recognised_by_its_words(name: str, wanted: str, is_it: bool) -> None:
    assert is_gpu_type(name, wanted) is is_it


@pytest.mark.parametrize(
    ("name", "vram_gb", "wanted", "is_it"),
    [
        ("A100 SXM", 80.0, "A100 80GB", True),  # RunPod
        ("A100 SXM4", 81.9, "A100 80GB", True),  # Vast.ai, which counts in MiB
        ("L40S", 46.1, "L40S 48GB", True),
        ("A100_80G", 80.0, "A100 80 GB", True),
        ("H100 SXM", 80.0, "NVIDIA H100", True),
        ("RTX 4090", 24.0, "NVIDIA GeForce RTX 4090", True),
        ("V100_16GB", 16.0, "Tesla V100 16GB", True),
        ("A100 SXM4", 41.0, "A100 80GB", False),
        ("A100", 0.0, "A100 80GB", False),
        ("A100_40GB", 80.0, "A100 80GB", False),
        ("H100 SXM", 80.0, "A100 80GB", False),
        ("H100 SXM", 80.0, "80GB", False),
        ("H100 SXM", 80.0, "NVIDIA", False),
        ("NVIDIA H100", 80.0, "NVIDIA GeForce", False),
    ],
)
def test_a_name_need_not_have_the_maker_nor_the_memory_of_a_gpu(
    name: str, vram_gb: float, wanted: str, is_it: bool
) -> None:
    offer = replace(OFFER, gpu_type=name, vram_gb=vram_gb)
    assert QUERY.model_copy(update={"gpu_types": (wanted,)}).admits(offer) is is_it


@pytest.mark.parametrize(
    ("offered", "found", "is_it"),
    [
        ("H100 SXM", "NVIDIA H100 80GB HBM3", True),
        ("A100_80GB", "NVIDIA A100-SXM4-80GB", True),
        ("RTX4090_24GB", "NVIDIA GeForce RTX 4090", True),
        ("GH200_96GB", "NVIDIA GH200 480GB", True),
        ("RTX 6000Ada", "NVIDIA RTX 6000 Ada Generation", True),
        ("RTX 4070S Ti", "NVIDIA GeForce RTX 4070 Ti SUPER", True),
        ("V100 (16 GB)", "Tesla V100-SXM2-16GB", True),
        ("RTXPRO6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", True),
        ("Titan RTX", "NVIDIA TITAN RTX", True),
        ("H100", "NVIDIA A100-SXM4-80GB", False),
        ("A100", "NVIDIA A10", False),
        ("A10", "NVIDIA A100-PCIE-40GB", False),
        ("H200", "NVIDIA GH200 480GB", False),
        ("L4", "NVIDIA L40", False),
        ("RTX 6000 Ada", "NVIDIA RTX A6000", False),
    ],
)
def test_another_model_than_was_offered_is_told_by_its_number(offered: str, found: str, is_it: bool) -> None:
    assert is_same_model(offered, found) is is_it


@pytest.mark.parametrize(
    "offer",
    [
        replace(OFFER, usd_per_hour=5.02),
        replace(OFFER, gpu_count=1, usd_per_hour=2.5),
        replace(OFFER, gpu_type="NVIDIA A100"),
        replace(OFFER, region="US-TX-3"),
        replace(OFFER, is_secure=False),
        replace(OFFER, is_spot=True),
        replace(OFFER, disk_gb=99),
        replace(OFFER, usd_per_hour=0.0),  # whoever gives machines away has made a mistake
        replace(OFFER, usd_per_hour=-5.0),
        replace(OFFER, usd_per_hour=float("nan")),
        replace(OFFER, gpu_type="NVIDIA H100 \x1b[2J"),
        replace(OFFER, region="EU\x1b]0;title\x07"),
    ],
)
def test_a_query_refuses_what_was_not_asked_for(offer: Offer) -> None:
    assert QUERY.admits(OFFER) and not QUERY.admits(offer)


@pytest.mark.parametrize(("wanted", "is_it"), [("ro", True), ("EU-RO", True), ("RO/EU", True), ("US", False)])
def test_a_region_is_named_by_its_country_or_its_data_center(wanted: str, is_it: bool) -> None:
    query = QUERY.model_copy(update={"regions": (wanted,)})
    assert query.admits(replace(OFFER, region="RO/EU-RO-1")) is is_it


@pytest.mark.parametrize("name", ["MI300X", "AMD Instinct MI300X OAM", "Radeon VII", "RX 7900 XTX", "Gaudi 2"])
def test_a_gpu_of_another_maker_is_taken_only_by_its_name(name: str) -> None:
    offer = replace(OFFER, gpu_type=name, vram_gb=192)
    query = QUERY.model_copy(update={"gpu_types": ()})
    assert query.admits(OFFER) and query.misses(offer) == ["gpu_types"]
    assert query.model_copy(update={"gpu_types": (name,)}).admits(offer)


A100 = replace(OFFER, gpu_type="NVIDIA A100", region="US-TX-3", usd_per_hour=2.0)


@pytest.mark.parametrize(
    ("offers", "sentence"),
    [
        ([], "the searched providers have no similar machine"),
        ([replace(OFFER, usd_per_hour=0.0)], "the searched providers have no similar machine"),
        (
            [replace(OFFER, usd_per_hour=9.0), A100, replace(OFFER, usd_per_hour=5.982)],
            "the cheapest is 2x NVIDIA H100 80GB HBM3 at runpod in EU-RO-1 for 3.00 USD per GPU and hour: "
            "raise <max_usd_per_gpu_hour> to that",
        ),
        (
            [replace(OFFER, region="US-TX-3", is_secure=False), A100, replace(A100, usd_per_hour=1.0, gpu_count=1)],
            "the closest is 2x NVIDIA A100 at runpod in US-TX-3 for 1.00 USD per GPU and hour, which does not match "
            "<gpu_types> and <regions>",
        ),
        (
            [replace(OFFER, region="US-TX-3", usd_per_hour=0.0, is_unpriced=True)],
            "the closest is 2x NVIDIA H100 80GB HBM3 at runpod in US-TX-3 at an unknown price, which does not "
            "match <regions>",
        ),
    ],
)
def test_the_closest_offer_is_the_cheapest_where_the_price_alone_is_amiss(offers: list[Offer], sentence: str) -> None:
    assert describe_closest(QUERY, offers, "<{}>".format) == sentence


@pytest.mark.parametrize(
    "wrong", [{"gpu_count": 0}, {"usd_per_hour": 1e308}, {"usd_per_hour": 0.0}, {"gpu_type": "\x1b"}]
)
def test_an_offer_that_cannot_be_true_is_none(wrong: dict[str, Any]) -> None:
    offer = replace(OFFER, **wrong)
    assert not GPUQuery().admits(offer)
    assert describe_closest(QUERY, [offer], str) == "the searched providers have no similar machine"


def test_every_condition_of_a_query_has_an_option_by_which_people_change_it() -> None:
    fields = set(GPUQuery.model_fields) - {"min_cuda", "providers"}  # these choose what is asked, not what fits
    assert set(OPTIONS) == fields


def test_a_search_needs_a_provider() -> None:
    """Without one, the search for a key of a provider ended in an IndexError."""
    with pytest.raises(ValidationError, match="at least 1 item"):
        GPUQuery(providers=())
