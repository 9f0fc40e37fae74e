"""Real processes with gloo: FSDP1. The scenarios are in fsdp1_ranks.py; one launch runs all of two ranks, one that of four."""

import pytest
from test_fsdp2 import launch

SCENARIOS = [
    "each_unit_sharded",
    "one_unit_whose_parameters_lie_on_different_ranks",
    "tied_weights",
    "mixed_precision",
    "unsharded_between_forward_and_backward",
    "replicated",
    "replicated_mixed_precision",
    "frozen_parameters_beside_trained_ones",
    "one_units_gradient_is_alive_at_a_time",
    "second_micro_batch_raises_on_every_rank",
    "a_forward_that_no_backward_follows_can_be_forgotten",
    "no_sync_is_refused_before_backward",
    "a_backward_alone_under_no_sync_is_found_by_step",
    "clipping_is_refused_on_every_rank",
    "what_fsdp1_cannot_do_is_refused",
    "a_model_that_does_not_hold_the_parameters_is_refused",
    "others_in_the_same_place_are_left_alone",
    "armed_late_and_disarmed",
    "armed_before_wrapping_raises",
    "an_optimizer_that_is_gone_leaves_nothing_behind",
    "names_in_messages_are_the_models",
    "checkpoint_round_trip",
]
SCRIPT = "fsdp1_ranks.py"


@pytest.fixture(scope="module")
def together():
    """All scenarios in one pair of processes; a failing one ends it, and is then named by its own test."""
    return launch(SCENARIOS, 2, SCRIPT)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(together, name):
    if f"passed {name}" not in together.stdout:
        alone = launch([name], 2, SCRIPT)
        assert f"passed {name}" in alone.stdout, alone.stdout[-3000:] + alone.stderr[-6000:]


def test_four_ranks():
    four = launch(["replicated_shards"], 4, SCRIPT)
    assert "passed replicated_shards" in four.stdout, four.stdout[-3000:] + four.stderr[-6000:]
