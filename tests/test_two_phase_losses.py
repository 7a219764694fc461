"""A rank that dies while operations are between their phases: all others raise, or agree on who took part and go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from cases import Case
from crew import Me, crew, die
from driving import Received, assert_received, copy_output
from losses import BOTH_WAYS, LONG_S, OTHERS, VICTIM, communicator
from test_masking import without_victim
from two_phase import exchange_in_phases, send, send_back


def _lose_one(me: Me, case: Case, policy: str, moment: str) -> Any:
    """Be a rank of which one dies: before its first dispatch, before the second one, or before its combines.

    Ranks receive in different orders, and agree all the same on who took part in what.
    """
    rank = me.group.rank
    comm = communicator(me.group, replace(case, max_in_flight=2), timeout_s=LONG_S, on_peer_loss=policy)
    exchange_in_phases(comm, case.inputs(0)[rank])
    exchange_in_phases(comm, case.inputs(1)[rank])
    requests = []
    for step in range(2):
        if rank == VICTIM and moment == ("before", "between")[step]:
            die()
        requests.append(send(comm, case.inputs(step)[rank]))
    results = []
    try:
        for request in requests if rank % 2 else reversed(requests):
            request.wait()
        received = [(copy_output(out), handle) for out, handle in (request.wait() for request in requests)]
        if rank == VICTIM:
            die()
        requests = [send_back(comm, *of_one) for of_one in received]
        for request in requests if rank % 2 else reversed(requests):
            request.wait()
        results = [Received(out, back.wait()) for (out, _), back in zip(received, requests, strict=True)]
    except ew.PeerLostError as error:
        for request in requests:
            if request._sent.error is None and request._sent.is_over:
                continue  # what was received before the loss stays
            with pytest.raises(ew.PeerLostError):
                request.wait()
            shown = request.result[0].layout if moment != "combine" else request.result
            if moment == "combine":
                assert np.isnan(shown.astype(np.float32)).all()
            else:
                assert not np.any(
                    shown.num_tokens_per_expert if shown.num_tokens_per_rank is None else shown.num_tokens_per_rank
                )
        with pytest.raises(ew.PeerLostError):
            comm.dispatch_async(case.inputs(0)[rank].x, case.inputs(0)[rank].topk_ids)
        return error.ranks
    finally:
        comm.close()
    return results


@BOTH_WAYS
@pytest.mark.parametrize("moment", ["before", "between", "combine"])
def test_a_rank_dies_and_the_others_raise(moment: str, case: Case) -> None:
    with crew(_lose_one, 4, case, "raise", moment) as ranks:
        assert [ranks[rank].result() for rank in OTHERS] == [(VICTIM,)] * 3


@BOTH_WAYS
@pytest.mark.parametrize("moment", ["before", "between", "combine"])
def test_a_rank_dies_and_the_others_agree_and_go_on(moment: str, case: Case) -> None:
    with crew(_lose_one, 4, case, "mask", moment) as ranks:
        results = [ranks[rank].result() for rank in OTHERS]
    for step in range(2):
        sent = moment == "combine" or (moment == "between" and step == 0)
        wanted = without_victim(case, step, sent)
        assert_received([of_rank[step] for of_rank in results], [wanted[rank] for rank in OTHERS], f"step {step}")
