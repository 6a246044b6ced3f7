"""Who keeps whose snapshots: probabilities equal to trying all, copies in different racks, and the command."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import subprocess
import sys
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.cli import main
from regrow.ids import Rank, Step
from regrow.peer.keeper import Keeper
from regrow.plan.placement import (
    TooManyCasesError,
    check_memory,
    domain_survivals,
    memory_needed,
    paper_bound,
    place,
    ring_survival,
    survival,
)
from regrow.run.copies import Copies, Host


def counted(fatal, count):
    """By size, the part of all sets of 0 ... count - 1 that contain none of the fatal ones, found by trying all."""
    fatal = {sum(1 << one for one in set(names)) for names in fatal}
    fine = [0] * (count + 1)
    for lost in range(1 << count):
        if not any(lost & one == one for one in fatal):
            fine[lost.bit_count()] += 1
    return [Fraction(found, math.comb(count, size)) for size, found in enumerate(fine)]


@pytest.mark.parametrize("hosts", range(1, 13))
def test_equal_to_brute_force(hosts):
    for copies in range(1, min(hosts, 4) + 1):
        placement = place(hosts, copies)
        sizes = range(hosts + 1)
        assert [survival(placement, lost) for lost in sizes] == counted(placement.keepers, hosts)
        assert domain_survivals(placement, hosts) == counted(placement.keepers, hosts)
        ring = [[(host + far) % hosts for far in range(copies)] for host in range(hosts)]
        assert [ring_survival(hosts, copies, lost) for lost in sizes] == counted(ring, hosts)


@pytest.mark.parametrize(
    ("lost", "groups", "ring"), [(1, 1, 1), (2, 0.933, 0.867), (3, 0.800, 0.629), (4, 0.615, 0.363)]
)
def test_known_values(lost, groups, ring):
    assert float(survival(place(16, 2), lost)) == pytest.approx(groups, abs=5e-4)
    assert float(ring_survival(16, 2, lost)) == pytest.approx(ring, abs=5e-4)


def test_the_bound_is_exact_below_two_whole_groups():
    for hosts, copies in itertools.product(range(1, 25), range(1, 5)):
        if copies > hosts:
            continue
        placement = place(hosts, copies)
        for lost in range(hosts + 1):
            exact, bound = survival(placement, lost), paper_bound(hosts, copies, lost)
            if lost < copies:
                assert exact == bound == 1
            elif hosts % copies == 0:
                assert exact == bound if lost < 2 * copies else exact >= bound
            if copies <= lost:
                assert exact >= ring_survival(hosts, copies, lost)


def test_groups_and_a_ring_of_the_rest():
    assert place(6, 2).groups == ((0, 1), (2, 3), (4, 5))
    assert place(6, 2).keepers == ((0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4))
    assert place(6, 2).ring == ()
    uneven = place(8, 3)
    assert uneven.groups == ((0, 1, 2), (3, 4, 5, 6, 7)) and uneven.ring == (3, 4, 5, 6, 7)
    assert uneven.keepers[6] == (6, 7, 3) and uneven.keeps[3] == (3, 7, 6)
    assert place(3, 1).keepers == ((0,), (1,), (2,))
    assert place(3, 3).groups == ((0, 1, 2),)


def test_racks_are_grouped_before_their_hosts():
    placement = place(8, 2, ["a", "a", "b", "b", "c", "c", "d", "d"])
    assert placement.groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert placement.fatal_domains == (frozenset("ab"), frozenset("cd"))
    assert domain_survivals(placement, 4) == [1, 1, Fraction(2, 3), 0, 0]
    five = place(20, 2, [rack for rack in "abcde" for _ in range(4)])
    assert set(map(frozenset, ("ab", "cd", "ce", "de"))) == set(five.fatal_domains)  # as five hosts would be
    assert not five.warnings


def test_a_ring_goes_round_again_where_there_are_few_racks():
    """Eight hosts, three copies: a ring of five would need five racks."""
    placement = place(8, 3, list("aabbccdd"))
    assert len(placement.ring) == 8 and not placement.warnings
    assert all(len({placement.domains[keeper] for keeper in keepers}) == 3 for keepers in placement.keepers)


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=24), st.integers(1, 5))
def test_every_host_has_its_keepers_apart(domains, copies):
    hosts = len(domains)
    copies = min(copies, hosts)
    placement = place(hosts, copies, domains)
    assert sorted(itertools.chain(*placement.groups)) == list(range(hosts))
    assert all(len(group) == copies for group in placement.groups[:-1])
    for host, keepers in enumerate(placement.keepers):
        assert keepers[0] == host and len(set(keepers)) == copies
        assert len(placement.keeps[host]) == copies  # no host keeps more than its share
        assert all(host in placement.keeps[keeper] for keeper in keepers)
    apart = [len({domains[keeper] for keeper in keepers}) == copies for keepers in placement.keepers]
    possible = max(map(domains.count, domains)) <= hosts // copies
    assert all(apart) == possible == (not placement.warnings)
    names = sorted(set(domains))
    fatal = [[names.index(domains[keeper]) for keeper in keepers] for keepers in placement.keepers]
    assert domain_survivals(placement, len(names)) == counted(fatal, len(names))


def test_no_single_rack_is_fatal_where_that_can_be():
    """More than its share of hosts, but not so many that a whole group must lie in it."""
    assert min(map(len, place(12, 3, list("aaaaaaaabbcd")).fatal_domains)) == 2
    assert min(map(len, place(6, 3, list("aaabbb")).fatal_domains)) == 2


def test_what_is_lost_together_is_said():
    few = place(6, 3, list("aaabbb")).warnings
    assert "3 copies need 3 failure domains" in few[0] and "there are 2" in few[0] and "keep 2 copies" in few[0]
    assert "6 of 6 hosts have copies that fail together; the loss of a and b is enough" in few[1]
    large = place(8, 2, list("aaaaaabc")).warnings
    assert "domain a has 6 of the 8 hosts" in large[0] and "at most 4" in large[0] and "keep 1 copy" in large[0]
    assert "4 of 8 hosts have copies that fail together; the loss of a is enough" in large[1]
    assert "snapshots of 4" in large[1]


@pytest.mark.parametrize(
    ("hosts", "copies", "domains", "why"),
    [
        (0, 1, None, "at least 1 host"),
        (3, 0, None, "at least 1 copy"),
        (3, 4, None, "4 copies need 4 hosts, but there are 3: take at most 3 copies"),
        (3, 2, ["a", "b"], "3 hosts, but 2 failure domains"),
    ],
)
def test_what_cannot_be(hosts, copies, domains, why):
    with pytest.raises(ValueError, match=why):
        place(hosts, copies, domains)
    if domains is None:
        for chance in (ring_survival, paper_bound):
            with pytest.raises(ValueError, match=why):
                chance(hosts, copies, 0)


def test_losses_that_cannot_be():
    for ask in (
        lambda lost: survival(place(4, 2), lost),
        lambda lost: ring_survival(4, 2, lost),
        lambda lost: paper_bound(4, 2, lost),
        lambda lost: domain_survivals(place(4, 2), lost),
    ):
        for lost in (-1, 5):
            with pytest.raises(ValueError, match=f"of 4 .* {lost} cannot be lost: give a number from 0 to 4"):
                ask(lost)


def test_memory():
    assert memory_needed(60e9, 2) == 240e9
    check_memory(60e9, 2, 240e9)
    check_memory(0, 2, 0)
    with pytest.raises(ValueError, match=r"240.00 GB on each host, but 130.00 GB is there: keep at most 1 copy, or"):
        check_memory(60e9, 2, 130e9)
    with pytest.raises(ValueError, match=r"a state of at most 32.50 GB per host"):
        check_memory(60e9, 2, 130e9)
    with pytest.raises(ValueError, match=r"not even the host's own fits; keep a state of at most 25.00 GB"):
        check_memory(60e9, 2, 100e9)
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="number of bytes"):
            memory_needed(wrong, 2)
    with pytest.raises(ValueError, match="number of bytes"):
        check_memory(0.0, 2, -1.0)
    with pytest.raises(ValueError, match="at least 1 copy"):
        memory_needed(1.0, 0)


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_a_thousand_hosts(copies):
    """Also in racks of every size, the hardest to count."""
    sizes = itertools.cycle(range(2, 40))
    racks = [f"r{rack}" for rack in range(60) for _ in range(next(sizes))][:1000]
    began = time.process_time()
    for domains in (None, racks, [f"r{host // 40}" for host in range(1000)]):
        placement = place(1000, copies, domains)
        chances = [survival(placement, lost) for lost in range(17)]
        assert chances == sorted(chances, reverse=True) and chances[copies - 1] == 1 > chances[copies]
        if domains:
            chances = domain_survivals(placement, 16)
            assert chances == sorted(chances, reverse=True) and chances[copies - 1] == 1 > chances[copies]
        ring = [ring_survival(1000, copies, lost) for lost in range(17)]
        assert ring[copies] < survival(placement, copies)
    assert time.process_time() - began < 10  # well under a second on a machine that does nothing else


def test_says_when_there_is_too_much_to_count(capsys, monkeypatch):
    monkeypatch.setattr("regrow.plan.placement._MOST_CASES", 2000)  # as many take no time
    racks = [f"r{rack}" for rack in range(60) for _ in range(2 + rack * 7 % 31)]
    with pytest.raises(TooManyCasesError, match="too many cases to count for 8 copies in 60 failure domains"):
        domain_survivals(place(len(racks), 8, racks), 16)
    assert main([*plan(len(racks), 8, domains=racks), "--losses", "9"]) == 0
    said = capsys.readouterr().out
    assert "(too many cases to count" in said and said.count(" -\n") == 9


def plan(hosts, copies, domains=None):
    words = ["plan", "placement", "--hosts", str(hosts), "--copies", str(copies)]
    return words if domains is None else [*words, "--domain-of", ",".join(domains)]


def test_prints_groups_chances_and_memory(capsys):
    assert main([*plan(16, 2), "--losses", "3", "--state", "60GB", "--memory", "256GB"]) == 0
    said = capsys.readouterr().out
    assert "16 hosts; the snapshots of each are kept by itself and 1 other" in said
    assert "8 groups of 2" in said and "0 1 | 2 3 | 4 5" in said and "a ring of" not in said
    rows = [line.split() for line in said.splitlines() if line.startswith("     ")]
    assert rows == [
        ["1", "1", "1", "1"],
        ["2", "0.933333", "0.933333", "0.866667"],
        ["3", "0.800000", "0.800000", "0.628571"],
    ]
    assert "memory on each host: 240.00 GB, of 256.00 GB (2 buffers x 2 hosts x 60.00 GB)" in said


def test_prints_a_ring_and_racks(capsys):
    assert main(plan(5, 2)) == 0
    said = capsys.readouterr().out
    assert "1 group of 2" in said and "a ring of 3: each sends to the next one\n  2 > 3 > 4 > 2" in said
    assert "2 does not divide 5" in said
    assert main([*plan(5, 3, ["a", "b", "c", " a", "b"]), "--losses", "5"]) == 0
    said = capsys.readouterr().out
    assert "5 hosts in 3 failure domains; the snapshots of each are kept by itself and 2 others" in said
    assert "warning: failure domain a has 2 of the 5 hosts" in said
    assert "0 (a)" in said and "domains" in said
    assert said.count(" -\n") == 2  # four and five of three domains cannot be lost
    assert main([*plan(2, 1), "--state", "1GB"]) == 0
    said = capsys.readouterr().out
    assert "nobody else keeps their snapshots" in said and "memory on each host: 2.00 GB (2 buffers" in said


def test_a_thousand_hosts_fit_the_screen(capsys):
    assert main([*plan(1001, 4), "--losses", "16"]) == 0
    said = capsys.readouterr().out
    assert "249 groups of 4" in said and "0 1 2 3 | 4 5 6 7" in said and "... | 992 993 994 995" in said
    assert "996 > 997 > 998 > 999 > 1000 > 996" in said
    assert "1-6.1e-09" in said  # not rounded to certainty
    assert max(map(len, said.splitlines())) <= 110 and len(said.splitlines()) < 40


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (plan(3, 4), "4 copies need 4 hosts"),
        (plan(3, 2, ["a", "b"]), "3 hosts, but 2 failure domains"),
        (plan(3, 2, ["a", "", "b"]), "a failure domain has no name in 'a,,b'"),
        ([*plan(4, 2), "--losses", "5"], "of 4 hosts, 5 cannot be lost: give a number from 1 to 4"),
        ([*plan(4, 2), "--losses", "0"], "0 cannot be lost"),
        ([*plan(4, 2), "--state", "big"], "is no size"),
        ([*plan(4, 2), "--memory", "1GB"], "give --state"),
        ([*plan(4, 2), "--state", "1GB", "--memory", "3GB"], "need 4.00 GB on each host, but 3.00 GB is there"),
        (["plan", "placement", "--hosts", "4"], "required: --copies"),
    ],
)
def test_one_sentence_for_what_is_wrong(words, why, capsys):
    assert main(words) == 2
    said = capsys.readouterr()
    assert why in said.err and said.err.count("error:") == 1 and not said.out


def test_answers_without_torch():
    code = (
        "import sys; from regrow.cli import main; main(sys.argv[1:]); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *plan(4, 2)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


class Told(list):
    """What was said, or which events were told of."""

    def __call__(self, name, **fields):
        self.append((name, fields) if fields else name)


def keepers(tmp_path, domains, copies=2):
    """Who keeps whose snapshots, by what the ranks of a running job work out, one on each host; and what they say."""
    with contextlib.ExitStack() as stack:
        hosts, said, events = [], Told(), Told()
        for node, domain in enumerate(domains):
            keeper = Keeper(tmp_path / f"{domain}-{node}", "127.0.0.1", "t", said)
            stack.callback(keeper.close)
            hosts.append(Host(node=node, keeper=keeper.address, kept=keeper.directory, copies=copies, domain=domain))
        ranks = [
            Copies(Rank(rank), host, "t", superseded=lambda: False, say=said, event=events)
            for rank, host in enumerate(hosts)
        ]
        envelopes = json.loads(json.dumps([rank.envelope() for rank in ranks]))
        for rank in ranks:
            stack.callback(rank.close)
            rank.heard(envelopes)
            assert rank.resume(1, Step(0)) == copies
            rank.heard(envelopes)
            rank.resume(2, Step(0))  # it says nothing twice
        return [fields["keepers"] for name, fields in events if name == "snapshot_keepers"][::2], said


def test_a_running_job_keeps_snapshots_in_other_racks(tmp_path):
    assert keepers(tmp_path / "1", [None] * 4) == ([[1], [0], [3], [2]], [])
    assert keepers(tmp_path / "2", ["a", "a", "b", "b"]) == ([[2], [3], [0], [1]], [])
    assert keepers(tmp_path / "3", ["1", None, "1", None]) == ([[1], [0], [3], [2]], [])  # no host is called 1
    found, said = keepers(tmp_path / "4", ["a", "a", "a", "b"])
    assert sorted(len(each) for each in found) == [1, 1, 1, 1]
    assert len(said) == 1 and said[0].startswith("snapshots: failure domain a has 3 of the 4 hosts: for 2 copies")
