"""What becomes of the world when hosts come and go: every rule as a line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.agent.happenings import (
    Exited,
    Finished,
    Forgotten,
    Led,
    Lost,
    LostWorker,
    NodeJoined,
    NodeLost,
    Resumed,
    SetupDone,
    Suspect,
)
from regrow.agent.membership import decide
from regrow.agent.world import Node, Phase, World


def after(world, *events):
    for event in events:
        world = decide(world, event).world
    return world


def new(nprocs=(2, 2), slots=None, max_restarts=100):
    """Nodes with sessions a, b, c, ..."""
    nodes = [Node(chr(97 + n), most) for n, most in enumerate(slots or nprocs)]
    return World.first(nprocs, max_restarts, 0.0, nodes)


def training(*args, **options):
    world = new(*args, **options)
    return after(world, *(SetupDone(rank, 0) for rank in range(world.world_size)))


def gone(*nodes, session=None, epoch=0, workers=(), t=7.0):
    lost = tuple(NodeLost(node, session or chr(97 + node), "silent") for node in nodes)
    return Lost(tuple(LostWorker(rank, 0, "SIGKILL", 5) for rank in workers), t, lost, epoch)


def standby(node, session="s", slots=2):
    return NodeJoined(node, session, slots)


def test_first_world():
    world = new((2, 1))
    assert (world.homes, world.local, world.homeless) == ((0, 0, 1), (0, 1, 0), ())
    assert World.loads(world.dumps()) == world


def test_standby_takes_over_all_ranks_of_a_lost_host_in_one_generation():
    world = after(training(), standby(2), gone(1))
    assert (world.generation, world.incarnation, world.holders) == (1, (0, 0, 1, 1), (0, 1))
    assert (world.homes, world.local, world.phase) == ((0, 0, 2, 2), (0, 1, 0, 1), Phase.TRAINING)
    assert world.restarts == 2
    assert world.reason.startswith("node 1 (silent) with ranks 2, 3 lost: replaced")
    assert world.reason.endswith("ranks 2, 3 now on node 2")
    assert not world.nodes[1].alive and world.nodes[2].alive
    assert after(world, Resumed(2, 1, 1), Resumed(3, 1, 1)).holders == (0, 1, 2, 3)


def test_hosts_and_workers_that_are_noticed_together_cost_one_generation():
    world = after(training((1, 1, 1)), standby(3, slots=3), gone(1, 2))
    assert (world.generation, world.homes, world.restarts) == (1, (0, 3, 3), 2)
    world = after(training((2, 2)), standby(2), gone(1, workers=(0,)))
    assert (world.generation, world.incarnation, world.homes) == (1, (1, 0, 1, 1), (0, 0, 2, 2))


def test_a_worker_whose_host_is_lost_too_counts_once():
    world = after(training(), standby(2), gone(1, workers=(2,)))
    assert (world.restarts, world.incarnation) == (2, (0, 0, 1, 1))


def test_free_slots_are_taken_evenly_and_only_if_there_is_no_standby():
    world = training((2, 2, 2), slots=(2, 3, 4))
    assert after(world, standby(3), gone(0)).homes == (3, 3, 1, 1, 2, 2)
    moved = after(world, gone(0))
    assert (moved.homes, moved.local) == ((1, 2, 1, 1, 2, 2), (2, 2, 0, 1, 0, 1))


def test_each_lost_hosts_ranks_stay_together_on_a_standby_that_has_room():
    world = after(training((2, 2, 2)), standby(3), standby(4, "t"), gone(1, 2))
    assert world.homes == (0, 0, 3, 3, 4, 4)
    world = after(training((1, 2)), standby(2, slots=4), standby(3, "t", slots=2), gone(1))
    assert world.homes == (0, 3, 3), "the standby that fits best: the larger one is for larger losses"


def test_standbys_too_small_for_all_share_them():
    world = after(training((1, 4)), standby(2), standby(3, "t"), gone(1))
    assert (world.homes, world.local) == ((0, 2, 3, 2, 3), (0, 0, 0, 1, 1))


def test_ranks_without_a_home_wait_and_the_others_keep_their_state():
    world = after(training(), gone(1))
    assert (world.phase, world.homes, world.homeless) == (Phase.TRAINING, (0, 0, None, None), (2, 3))
    assert (world.holders, world.generation) == ((0, 1), 1)
    assert world.reason.endswith("ranks 2, 3 wait for a host")
    some = after(world, standby(2, slots=1))
    assert (some.homes, some.homeless, some.generation) == ((0, 0, 2, None), (3,), 1)
    assert some.incarnation == world.incarnation, "they were lost once"
    assert some.reason == "node 2 has joined; rank 2 now on node 2, rank 3 waits for a host"
    assert after(some, standby(3, "t", slots=1)).homes == (0, 0, 2, 3)


def test_a_worker_that_dies_meanwhile_stays_at_home():
    world = after(training(), gone(1), Lost((LostWorker(0, 0, "SIGKILL"),)))
    assert (world.homes, world.generation, world.holders) == ((0, 0, None, None), 2, (1,))


def test_loss_of_a_host_during_anothers_recovery():
    world = after(training((1, 1, 1)), standby(3, slots=1), gone(1), gone(2))
    assert (world.generation, world.homes, world.holders) == (2, (0, 3, None), (0,))
    world = after(world, gone(3, session="s"))
    assert (world.generation, world.homes, world.incarnation) == (3, (0, None, None), (0, 2, 1))


def test_no_holder_left_starts_again_where_there_is_room():
    world = after(training((1, 1)), gone(1), standby(2, slots=1), gone(0))
    assert (world.phase, world.incarnation) == (Phase.SETUP, (1, 2))
    assert (world.homes, world.homeless) == ((None, 2), (0,))
    assert "no one holds the training state any more" in world.reason
    assert after(world, standby(3, "t", slots=1)).homes == (3, 2)


def test_loss_of_a_host_during_setup_starts_all_again():
    world = after(new(), SetupDone(0, 0), standby(2), gone(1))
    assert (world.phase, world.incarnation, world.ready) == (Phase.SETUP, (1, 1, 1, 1), ())
    assert world.homes == (0, 0, 2, 2)
    assert world.restarts == 2, "those of the other host are not to blame"


def test_ranks_that_had_left_during_setup_start_again_elsewhere():
    world = after(new(), Exited(2, 0), standby(2), gone(1))
    assert (world.exited, world.homes) == ({}, (0, 0, 2, 2))


def test_loss_of_a_host_after_the_last_step():
    world = after(training((1, 1)), Finished(0, 0, 0), Finished(1, 0, 0))
    failed = after(world, gone(1))
    assert (failed.phase, failed.exit_code) == (Phase.FAILED, 1)
    assert failed.reason.startswith("rank 1 died (its host, node 1: silent) after the last step")
    done = after(world, Exited(1, 0, 9), gone(1), Exited(0, 0, 9))
    assert (done.phase, done.generation) == (Phase.DONE, 0), "its worker had ended well"
    assert done.homeless == ()


def test_loss_of_a_standby_costs_nothing():
    world = after(training(), standby(2), gone(2, session="s"))
    assert (world.generation, world.homes, world.restarts) == (0, (0, 0, 1, 1), 0)
    assert after(world, gone(1)).homeless == (2, 3)


def test_each_worker_of_a_lost_host_counts_as_a_restart():
    world = after(training(max_restarts=1), standby(2), gone(1))
    assert world.phase is Phase.FAILED and "2 workers were lost, more than --max-restarts 1" in world.reason


def test_loss_is_fenced_by_the_session():
    world = after(training(), standby(2), gone(1), standby(1, "back"))
    assert world.nodes[1] == Node("back", 2, standby=True)
    assert decide(world, gone(1)).world is world
    assert decide(world, standby(1, "back")).world is world
    assert after(world, gone(1, session="back")).generation == 1


def test_a_session_does_not_come_back():
    world = after(training(), standby(2), gone(1))
    assert decide(world, standby(1, "b")).world is world


def test_whoever_takes_a_place_is_not_the_one_who_had_it():
    world = after(training(), NodeJoined(1, "again", 2))
    assert (world.generation, world.homes, world.incarnation) == (1, (0, 0, 1, 1), (0, 0, 1, 1))
    assert world.knows(1, "again") and not world.knows(1, "b")


def test_leaders_are_counted_and_older_ones_are_not_listened_to():
    world = after(training(), Led(0, "a"))
    assert (world.epoch, world.leader) == (1, "a")
    assert decide(world, Led(0, "a")).world is world
    assert decide(world, Led(1, "not a member")).world is world
    assert decide(world, gone(1, epoch=0)).world is world
    later = after(world, Led(1, "b"))
    assert later.epoch == 2
    assert decide(later, gone(0, epoch=1)).world is later
    assert after(later, gone(0, epoch=2)).homeless == (0, 1)
    own = after(later, gone(0, epoch=1, workers=(2,)))
    assert own.incarnation == (0, 0, 1, 0), "its own workers are still its to report"


def test_a_host_that_leaves_says_so_itself():
    world = after(training(), standby(2), Led(0, "a"), gone(2, session="s", epoch=None))
    assert not world.nodes[2].alive


def test_how_long_the_setup_took_is_known_to_those_who_come_later():
    world = after(World.first([2], 9, 100.0), SetupDone(0, 0, 103.0), SetupDone(1, 0, 104.0))
    assert world.setup_s == 4.0


ranks, small, nodes = st.integers(0, 3), st.integers(0, 3), st.integers(0, 4)
sessions = st.sampled_from("abst")
anything = st.one_of(
    st.builds(SetupDone, ranks, small, kept=st.booleans()),
    st.builds(Forgotten, ranks, small, small, st.just("gone")),
    st.builds(Resumed, ranks, small, small),
    st.builds(Finished, ranks, small, small),
    st.builds(Suspect, ranks, small, small, st.just("why")),
    st.builds(Exited, ranks, small, small),
    st.builds(lambda rank, n: Lost((LostWorker(rank, n, "SIGKILL"),)), ranks, small),
    st.builds(NodeJoined, nodes, sessions, st.integers(1, 4), st.booleans()),
    st.builds(Led, nodes, sessions),
    st.builds(gone, nodes, session=sessions, epoch=small),
    st.builds(gone, nodes, nodes, session=sessions, epoch=st.none()),
)


@pytest.mark.parametrize("slots", [(2, 2), (4, 3)])
@given(events=st.lists(anything, max_size=40))
def test_whatever_comes_no_rank_has_two_homes_or_a_dead_one(slots, events):
    world = new(slots=slots, max_restarts=30)
    for event in events:
        before, world = world, decide(world, event).world
        assert World.loads(world.dumps()) == world
        assert world.epoch >= before.epoch and world.generation >= before.generation
        if world.over:
            break
        for node, one in world.nodes.items():
            places = [world.local[rank] for rank in world.ranks_of(node)]
            assert len(set(places)) == len(places) and all(place < one.slots for place in places)
            assert one.alive or not places
        room = sum(one.slots - len(world.ranks_of(node)) for node, one in world.nodes.items() if one.alive)
        assert not (world.homeless and room), "nobody waits while there is room"
        for rank in range(world.world_size):
            if world.homes[rank] != before.homes[rank]:
                again = before.homes[rank] is None and world.incarnation[rank] == before.incarnation[rank]
                out = world.homes[rank] is None and rank in world.exited
                assert world.incarnation[rank] > before.incarnation[rank] or again or out
