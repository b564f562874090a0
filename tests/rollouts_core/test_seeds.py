"""Pins that derived seeds differ where they must, and that a run without a replicate keeps its own.

Without it two samples, ranks or replicates could draw the same random numbers, and look like two.
"""

from rollouts_core.seeds import derive_seed, replicate_seed


def test_seeds_of_different_places_differ_and_fit_into_31_bits() -> None:
    seeds = {derive_seed(seed, name, i) for seed in range(4) for name in ("rank", "replicate") for i in range(50)}
    assert len(seeds) == 4 * 2 * 50
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_replicate_0_is_the_run_itself_and_others_are_not() -> None:
    assert replicate_seed(7, 0) == 7
    assert len({replicate_seed(seed, replicate) for seed in (7, 8) for replicate in range(20)}) == 40
