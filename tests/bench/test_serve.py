"""The load generator of `bench serve`: streamed responses, counted failures, and metrics of synthetic timings."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from auraflux.bench.load import metrics, server, sweep
from auraflux.bench.load.client import Client, pause_s
from auraflux.bench.load.pool import WorkerPool
from auraflux.bench.load.record import Record, judge
from auraflux.bench.load.response import MAX_BODY_NBYTES, ProtocolError, Response
from auraflux.bench.load.worker import make_bodies, send_all
from auraflux.bench.load.workload import Chain, Target, Work, parse_url, poisson, staggered, together
from auraflux.errors import BackendError, InputError
from tests.bench.load_stub import VOCAB, Stub, event, running, token, usage

WORK = Work("stub", VOCAB, prompt=6, tokens=4, seed=1, timeout_s=20)


def streamed(*arrivals: tuple[float, bytes], complete: bool = True) -> Response:
    """Return a response whose events arrived at the given times."""
    response = Response()
    response.begin(0.0, 200, {"content-type": "text/event-stream; charset=utf-8"})
    for now, data in arrivals:
        response.feed(now, data)
    response.complete = complete
    return response


def json_response(
    status: int, content: Any, headers: dict[str, str] | None = None, now: float = 1.0, complete: bool = True
) -> Response:
    """Return a response with a JSON body."""
    response, body = Response(), json.dumps(content).encode()
    response.begin(now, status, {"content-type": "application/json", **(headers or {})})
    response.feed(now, body if complete else body[:-3])
    response.complete = complete
    return response


def stream(
    *times: float, sent: float = 0.0, client: int = 0, events: list[int] | None = None, tokens: int | None = None
) -> Record:
    """Return the record of a stream whose events arrived at the given times."""
    events = events or [1] * len(times)
    return Record(client, sent, times[-1], list(times), events, 10, sum(events) if tokens is None else tokens, 0)


END = event({"choices": [], "usage": usage(6, 3, 2)}) + event(b"[DONE]")


def test_events_have_the_times_of_their_arrival():
    response = streamed((2.0, token()), (3.0, token() + token(finish="length") + END))
    assert (response.times, response.events) == ([2.0, 3.0], [1, 4])
    record = judge(response, 7, 0.5, 2)
    assert record == Record(7, 0.5, 3.0, [2.0, 3.0], [1, 2], 6, 3, 2, 2, None)


def test_events_do_not_depend_on_packet_boundaries():
    stream_bytes = token('data: "data:\n\ndata: "') + token() + token() + END
    for size in (1, 2, 3, 7, 50):
        response = streamed(*((at, stream_bytes[at : at + size]) for at in range(0, len(stream_bytes), size)))
        record = judge(response, 0, 0.0, 0)
        assert (sum(record.events), record.tokens, record.failure) == (3, 3, None)


def test_finish_reason_event_is_not_a_token():
    response = streamed((1.0, token() * 3), (2.0, token("", "length")), (3.0, END))
    assert judge(response, 0, 0.0, 0).times == [1.0]


def test_a_stream_without_usage_counts_its_events():
    assert judge(streamed((1.0, token() * 3 + event(b"[DONE]"))), 0, 0.0, 0).tokens == 3


@pytest.mark.parametrize(
    ("response", "failure"),
    [
        (streamed((1.0, token()), complete=False), "a stream broke off before its end"),
        (streamed((1.0, token())), "a stream broke off before its end"),
        (streamed((1.0, token() + event({"error": {"message": "no\npages"}}) + END)), "error in the stream: no pages"),
        (streamed((1.0, event({"error": "gone"}))), "error in the stream: gone"),
        (streamed((1.0, event(b"[DONE]"))), "a stream without tokens"),
        (json_response(500, {"error": {"message": "of our making"}}), "HTTP 500: of our making"),
        (json_response(400, {"object": "error", "message": "too long"}), "HTTP 400: too long"),
        (json_response(503, "?"), "HTTP 503"),
        (json_response(200, {"choices": []}), "an answer without usage"),
        (json_response(200, {"choices": []}, complete=False), "an answer broke off"),
        (json_response(200, {"error": {"message": "no"}}), "error in the answer: no"),
    ],
)
def test_responses_that_are_failures(response: Response, failure: str):
    assert judge(response, 0, 0.0, 0).failure == failure


def test_a_response_that_is_not_streamed_has_no_times():
    record = judge(json_response(200, {"choices": [], "usage": usage(6, 3)}, now=4.0), 0, 1.0, 0)
    assert (record.failure, record.tokens, record.cached, record.ended, record.streamed) == (None, 3, None, 4.0, False)


def test_body_size_is_limited():
    response = json_response(200, {})
    with pytest.raises(ProtocolError, match=r"a body of more than \d+ bytes"):
        response.feed(1.0, bytes(MAX_BODY_NBYTES))


def test_retry_after_is_honoured_within_limits():
    def pause(**headers: str) -> float:
        return pause_s(json_response(429, {}, {name.replace("_", "-"): value for name, value in headers.items()}))

    assert (pause(retry_after="3"), pause(retry_after_ms="250", retry_after="3"), pause()) == (3.0, 0.25, 1.0)
    assert (pause(retry_after="9999"), pause(retry_after="nan"), pause(retry_after="Tue, 1 Jan")) == (30.0, 0.02, 1.0)


def test_percentiles_are_weighted():
    assert metrics.percentile([(float(n), 1.0) for n in range(1, 101)], 0.99) == 99
    assert metrics.percentile([(3.0, 1.0), (1.0, 97.0), (2.0, 2.0)], 0.5) == 1
    assert metrics.percentile([(3.0, 1.0), (1.0, 97.0), (2.0, 2.0)], 0.99) == 2
    assert metrics.percentile([(0.1, 0.1)] * 3, 1.0) == 0.1
    assert metrics.percentile([], 0.5) is None


def test_tokens_that_arrive_together_share_their_gap():
    assert metrics.gaps([stream(1.0, 2.0, 5.0, events=[1, 1, 3])]) == [(1.0, 1.0), (1.0, 3.0)]
    # two tokens in every event
    assert metrics.gaps([stream(1.0, 2.0, events=[1, 1], tokens=4)]) == [(0.5, 2.0)]
    assert metrics.gaps([stream(1.0, 2.0, 5.0)], (1.5, 6.0)) == [(3.0, 1.0)]


def test_decode_throughput_is_measured_under_full_load():
    early, late = stream(1.0, 2.0, 3.0, 4.0, 5.0, sent=0.0), stream(2.5, 3.5, 4.5, 5.5, 6.5, sent=0.0)
    assert metrics.all_decoding([early, late]) == (2.5, 5.0)
    # at 3, 3.5, 4, 4.5 and 5
    assert metrics.decode_rate([early, late]) == pytest.approx(5 / 2.5)
    assert metrics.decode_rate([early, stream(6.0, 7.0)]) is None


def test_decode_time_by_difference_excludes_prefill():
    one, many = [stream(2.0), stream(3.0)], [stream(2.0, 6.0, 9.0), stream(3.0, 6.0, 9.5, 11.0)]
    assert metrics.decode_rate_by_difference(one, many) == pytest.approx((7 - 2) / (11.0 - 3.0))
    assert metrics.decode_rate_by_difference(many, one) is None


def test_the_best_of_several_rounds_counts_and_one_with_a_failure_does_not():
    slow, fast = [stream(1.0, 3.0, 5.0)], [stream(1.0, 2.0, 3.0)]
    failed = [Record(0, 0.0, 0.1, failure="gone")]
    found = metrics.all_at_once([[stream(2.0)], [stream(1.0)], failed], [slow, fast, failed])
    assert found["decode_tokens_per_s"] == pytest.approx(1.0)
    assert found["prompt_tokens_per_s"] == pytest.approx(10.0)
    assert found["decode_tokens_per_s_by_difference"] == pytest.approx(2 / (3.0 - 1.0))
    assert found["inter_token_ms"] == {"p50": 1000, "p90": 2000, "p99": 2000}
    assert set(metrics.all_at_once([failed], [failed]).values()) == {None}


def test_full_load_is_from_the_last_start_to_the_first_end():
    first = [stream(1.0, 2.0, sent=0.0), stream(3.0, 8.0, sent=2.0)]
    second = [stream(5.0, 6.0, sent=4.0, client=1), stream(7.0, 9.0, sent=6.0, client=1)]
    assert metrics.full_load([first, second]) == (4.0, 8.0)
    assert metrics.full_load([first[:1], second[1:]]) is None
    found = metrics.sustained([first, second], (4.0, 8.0))
    assert found["requests_per_s"] == pytest.approx(2 / 4)
    assert found["output_tokens_per_s"] == pytest.approx(4 / 4)
    assert found["time_to_first_token_ms"] == {"p50": 1000, "p90": 1000, "p99": 1000}
    assert found["end_to_end_ms"] == {"p50": 2000, "p90": 3000, "p99": 3000}
    assert found["inter_token_p99_over_p50"] == 1


def test_outcome_counts_finish_reasons_and_failures():
    good = Record(0, 0.0, 1.0, [0.5], [1], 10, 4, 5, refused=2)
    unfinished = Record(0, 0.0, 1.0, [0.5], [3], 10, 3, None)
    found = metrics.outcome([good, unfinished, Record(1, 0.0, 1.0, failure="gone"), Record(2, 0.0, 1.0, failure="gone")], 4)
    assert (found["requests"], found["failed"], found["failures"], found["refused"]) == (4, 2, {"gone": 2}, 2)
    assert (found["short"], found["found_share"], found["tokens_per_event"]) == (1, 0.5, 7 / 4)


def test_prompts_share_the_requested_prefix():
    work = Work("m", VOCAB, prompt=20, shared=8, seed=3)
    a, b = work.ids("a"), work.ids("b")
    assert a[:8] == b[:8]
    assert a[8:] != b[8:]
    assert (len(a), work.ids("a"), max(a) < VOCAB) == (20, a, True)
    assert Work("m", VOCAB, prompt=20, shared=8, seed=4).ids("a") != a


def test_chains():
    assert [len(chain.names) for chain in together("x", 3, 8, 4)] == [3, 3, 2]
    assert [chain.delay_s for chain in staggered("x", 4, 4, 4, 2.0)] == [0.0, 0.5, 1.0, 1.5]
    assert len(together("x", 8, 2, 4)) == 2
    names = [name for chain in together("x", 3, 8, 4) for name in chain.names]
    assert len(set(names)) == 8
    due = [chain.delay_s for chain in poisson("x", 10.0, 2000, 4, seed=0)]
    assert due == sorted(due)
    assert due[-1] == pytest.approx(200, rel=0.1)


def test_addresses():
    assert parse_url("http://127.0.0.1:8000/v1/") == Target("127.0.0.1", 8000)
    assert parse_url("https://a.example/api", "key") == Target("a.example", 443, True, "/api", "key")
    assert parse_url("http://[::1]:80").url == "http://[::1]:80"
    for wrong in ("127.0.0.1:8000", "ftp://a", "http://", "http://a:port", "http://a b", "http://[::1"):
        with pytest.raises(InputError, match="is not the address of a server"):
            parse_url(wrong)
    with pytest.raises(InputError, match="API key"):
        parse_url("http://a", "a\r\nb")


def send(stub: Stub, chains: list[Chain], work: Work = WORK) -> list[Record]:
    """Send chains of requests to a stub in this process."""

    async def main() -> list[Record]:
        async with await stub.serve():
            client = Client(Target("127.0.0.1", stub.port, api_key="secret"))
            seen = await send_all(client, work, chains, make_bodies(work, chains), time.monotonic())
            await client.close()
            # let both ends close
            await asyncio.sleep(0.01)
            return metrics.flat(seen)

    return asyncio.run(main())


def test_a_connection_carries_one_request_after_another():
    stub = Stub()
    records = send(stub, together("x", 2, 6, 4))
    assert [(record.failure, record.tokens, record.prompt, record.cached) for record in records] == [(None, 4, 6, 3)] * 6
    assert stub.connections == 2
    assert set(stub.keys) == {"Bearer secret"}
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in stub.bodies)


def test_failures_are_counted_and_the_load_continues():
    stub = Stub("truncated", "error", "server_error", "no_response", "invalid_json", "complete")
    records = send(stub, together("x", 1, 6, 4))
    assert [record.failure for record in records] == [
        "a stream broke off before its end",
        "error in the stream: out of pages",
        "HTTP 500: of our making",
        # the keep-alive connection was closed, so the request is retried on a new one
        "not HTTP: an answer that begins with b'SSH-2.0-OpenSSH'",
        None,
        None,
    ]


def test_a_refused_request_is_sent_again():
    (record,) = send(Stub("busy", "busy"), together("x", 1, 1, 4))
    assert (record.refused, record.failure, record.tokens) == (2, None, 4)


def test_stale_keep_alive_connection_is_retried():
    stub = Stub("closing", "closing")
    assert [record.failure for record in send(stub, together("x", 1, 3, 4))] == [None] * 3
    assert stub.connections == 3


def test_non_streamed_responses_are_measured():
    records = send(Stub(), together("x", 2, 2, 4), Work("stub", VOCAB, prompt=6, tokens=4, stream=False))
    assert [(record.failure, record.tokens, record.times) for record in records] == [(None, 4, [])] * 2


def test_requests_carry_the_given_temperature():
    sent = [json.loads(Work("stub", VOCAB, temperature=each).body("a", 4))["temperature"] for each in (0.0, 1.0)]
    assert sent == [0.0, 1.0]


def test_unreachable_server_is_a_failure():
    async def main() -> Record:
        client = Client(Target("127.0.0.1", server._free_port()))
        record = await client.complete(b"{}", 0, 0.0, 5.0)
        await client.close()
        return record

    assert asyncio.run(main()).failure == "connection refused"


def test_requests_time_out():
    async def main() -> Record:
        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async with await asyncio.start_server(hang, "127.0.0.1", 0) as listening:
            client = Client(Target("127.0.0.1", listening.sockets[0].getsockname()[1]))
            record = await client.complete(b"{}", 0, 0.0, 0.05)
            await client.close()
            await asyncio.sleep(0.01)
            return record

    assert asyncio.run(main()).failure == "no whole answer within 0.05 s"


def test_load_levels_run_in_client_processes():
    with running(Stub("busy")) as url, WorkerPool(parse_url(url), 2) as pool:
        row = sweep.closed_level(pool.run, WORK, 2, sweep.Amounts(requests=4, warmup=1), lambda text: None)
        later = sweep.poisson_level(pool.run, WORK, 200.0, sweep.Amounts(requests=5, warmup=0), lambda text: None)
    assert (row["clients"], row["requests"], row["failed"], row["short"], row["found_share"]) == (2, 6, 0, 0, 0.5)
    assert row["prompt_tokens_per_s"] > 0
    assert row["end_to_end_ms"]["p50"] >= row["time_to_first_token_ms"]["p50"]
    assert (later["rate"], later["requests"], later["failed"], later["decode_tokens_per_s"]) == (200.0, 5, 0, None)


def test_dead_client_process_is_a_one_sentence_error():
    with WorkerPool(Target("127.0.0.1", 1), 1) as pool:
        pool._processes[0].kill()
        pool._processes[0].join()
        with pytest.raises(BackendError, match="a process that sends requests ended"):
            pool.run(WORK, together("x", 1, 1, 4))


STUB = [sys.executable, str(Path(__file__).with_name("load_stub.py"))]


def test_a_server_is_started_and_stopped(monkeypatch):
    monkeypatch.setattr(server, "COMMAND", STUB)
    with server.started(["--max-sequences", "8"], None, lambda text: None) as target:
        assert server.ask_models(target) == server.Served("stub", VOCAB, None)
    with pytest.raises(BackendError, match=r"no server answers at http://127.0.0.1:\d+: connection refused\."):
        server.ask_models(target)


def test_failed_server_start_prints_the_reason(monkeypatch):
    monkeypatch.setattr(server, "COMMAND", STUB)
    with (
        pytest.raises(BackendError, match=r"ended before it was ready: there is no model\.$"),
        server.started(["--refuse"], None, lambda text: None),
    ):
        pass


def test_unknown_model_is_refused():
    with running(Stub()) as url:
        assert server.ask_models(parse_url(url), "stub").model == "stub"
        with pytest.raises(InputError, match=r"has no model 'other'. Those it has: stub\."):
            server.ask_models(parse_url(url), "other")
