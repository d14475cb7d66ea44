"""The load that `bench serve` makes: answers read as they come, failures counted, figures from times that are made up."""

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest

from auraflux.bench.load import figures, levels, server
from auraflux.bench.load.answer import Answer, Chunks, NotHttp
from auraflux.bench.load.client import Client, pause_s
from auraflux.bench.load.crew import Crew
from auraflux.bench.load.plan import Chain, Target, Work, parse_url, poisson, staggered, together
from auraflux.bench.load.record import Record, judge
from auraflux.bench.load.worker import make_bodies, send_all
from auraflux.errors import BackendError, InputError
from tests.bench.load_stub import HEAD, VOCAB, Stub, chunk, event, plain, running, token, usage

WORK = Work("stub", VOCAB, prompt=6, tokens=4, seed=1, timeout_s=20)


def answered(*arrivals: tuple[float, bytes], closed: bool = False) -> Answer:
    answer = Answer()
    for now, data in arrivals:
        answer.feed(now, data)
    if closed:
        answer.close()
    return answer


def stream(
    *times: float, sent: float = 0.0, client: int = 0, events: list[int] | None = None, tokens: int | None = None
) -> Record:
    """A record of a stream whose events came at such times."""
    events = events or [1] * len(times)
    return Record(client, sent, times[-1], list(times), events, 10, sum(events) if tokens is None else tokens, 0)


END = chunk(event({"choices": [], "usage": usage(6, 3, 2)})) + chunk(event(b"[DONE]")) + chunk(b"")


def test_events_have_the_times_of_their_arrival():
    answer = answered((1.0, HEAD), (2.0, chunk(token())), (3.0, chunk(token()) + chunk(token(finish="length")) + END))
    assert (answer.whole, answer.status, answer.times, answer.events) == (True, 200, [2.0, 3.0], [1, 4])
    record = judge(answer, 7, 0.5, 2)
    assert record == Record(7, 0.5, 3.0, [2.0, 3.0], [1, 2], 6, 3, 2, 2, None)


def test_however_the_bytes_are_cut_the_events_are_the_same():
    whole = HEAD + chunk(token('data: "data:\n\ndata: "')) + chunk(token()[:9]) + chunk(token()[9:]) + chunk(token()) + END
    for size in (1, 2, 3, 7, 50):
        answer = answered(*((at, whole[at : at + size]) for at in range(0, len(whole), size)))
        record = judge(answer, 0, 0.0, 0)
        assert (answer.whole, sum(record.events), record.tokens, record.failure) == (True, 3, 3, None)


def test_an_event_that_only_ends_the_text_is_no_token():
    answer = answered((1.0, HEAD + chunk(token()) * 3), (2.0, chunk(token("", "length"))), (3.0, END))
    assert judge(answer, 0, 0.0, 0).times == [1.0]


def test_a_stream_without_usage_counts_its_events():
    answer = answered((1.0, HEAD + chunk(token()) * 3 + chunk(event(b"[DONE]")) + chunk(b"")))
    assert judge(answer, 0, 0.0, 0).tokens == 3


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (HEAD + chunk(token()), "a stream broke off before its end"),
        (HEAD + chunk(token()) + chunk(b""), "a stream broke off before its end"),
        (HEAD + chunk(token()) + chunk(event({"error": {"message": "no\npages"}})) + END, "error in the stream: no pages"),
        (HEAD + chunk(event({"error": "gone"})) + chunk(b""), "error in the stream: gone"),
        (HEAD + chunk(event(b"[DONE]")) + chunk(b""), "a stream without tokens"),
        (plain(500, {"error": {"message": "of our making"}}), "HTTP 500: of our making"),
        (plain(400, {"object": "error", "message": "too long"}), "HTTP 400: too long"),
        (plain(503, "?"), "HTTP 503"),
        (plain(200, {"choices": []}), "an answer without usage"),
        (plain(200, {"choices": []})[:-3], "an answer broke off"),
        (b"HTTP/1.1 20", "an answer broke off"),
    ],
)
def test_answers_that_are_failures(data, failure):
    assert judge(answered((1.0, data), closed=True), 0, 0.0, 0).failure == failure


def test_an_answer_that_is_not_streamed_has_no_times():
    record = judge(answered((4.0, plain(200, {"choices": [], "usage": usage(6, 3)}))), 0, 1.0, 0)
    assert (record.failure, record.tokens, record.cached, record.ended, record.streamed) == (None, 3, None, 4.0, False)


def test_a_body_without_length_ends_with_the_connection():
    answer = answered((1.0, b"HTTP/1.0 200 OK\r\n\r\n{}"))
    assert not answer.whole
    answer.close()
    assert (answer.whole, answer.kept_open, answer.json()) == (True, False, {})


def test_what_is_not_http_is_told_so():
    with pytest.raises(NotHttp, match="begins with b'SSH"):
        answered((1.0, b"SSH-2.0\r\n"))
    with pytest.raises(NotHttp, match="content-length of 'many'"):
        answered((1.0, b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n"))
    with pytest.raises(NotHttp, match="a chunk of size b'zz'"):
        Chunks().feed(b"zz\r\n")


def test_chunks_may_have_extensions_and_trailers():
    chunks = Chunks()
    assert chunks.feed(b"3;a=b\r\nabc\r\n0\r\nname: value\r\n") == b"abc"
    assert not chunks.whole
    chunks.feed(b"\r\n")
    assert chunks.whole


def test_pauses_are_what_the_server_wants_within_reason():
    def pause(*headers: str) -> float:
        return pause_s(answered((0.0, plain(429, {}, *headers))))

    assert (pause("retry-after: 3"), pause("retry-after-ms: 250", "retry-after: 3"), pause()) == (3.0, 0.25, 1.0)
    assert (pause("retry-after: 9999"), pause("retry-after: nan"), pause("retry-after: Tue, 1 Jan")) == (30.0, 0.02, 1.0)


def test_percentiles_weigh():
    assert figures.percentile([(float(n), 1.0) for n in range(1, 101)], 0.99) == 99
    assert figures.percentile([(3.0, 1.0), (1.0, 97.0), (2.0, 2.0)], 0.5) == 1
    assert figures.percentile([(3.0, 1.0), (1.0, 97.0), (2.0, 2.0)], 0.99) == 2
    assert figures.percentile([(0.1, 0.1)] * 3, 1.0) == 0.1
    assert figures.percentile([], 0.5) is None


def test_tokens_that_arrive_together_share_their_gap():
    assert figures.gaps([stream(1.0, 2.0, 5.0, events=[1, 1, 3])]) == [(1.0, 1.0), (1.0, 3.0)]
    # two tokens in every event
    assert figures.gaps([stream(1.0, 2.0, events=[1, 1], tokens=4)]) == [(0.5, 2.0)]
    assert figures.gaps([stream(1.0, 2.0, 5.0)], (1.5, 6.0)) == [(3.0, 1.0)]


def test_decoding_is_measured_while_all_write():
    early, late = stream(1.0, 2.0, 3.0, 4.0, 5.0, sent=0.0), stream(2.5, 3.5, 4.5, 5.5, 6.5, sent=0.0)
    assert figures.all_writing([early, late]) == (2.5, 5.0)
    # at 3, 3.5, 4, 4.5 and 5
    assert figures.decode_rate([early, late]) == pytest.approx(5 / 2.5)
    assert figures.decode_rate([early, stream(6.0, 7.0)]) is None


def test_decoding_by_difference_is_what_more_tokens_take():
    one, many = [stream(2.0), stream(3.0)], [stream(2.0, 6.0, 9.0), stream(3.0, 6.0, 9.5, 11.0)]
    assert figures.decode_rate_by_difference(one, many) == pytest.approx((7 - 2) / (11.0 - 3.0))
    assert figures.decode_rate_by_difference(many, one) is None


def test_the_best_of_several_rounds_counts_and_one_with_a_failure_does_not():
    slow, fast = [stream(1.0, 3.0, 5.0)], [stream(1.0, 2.0, 3.0)]
    failed = [Record(0, 0.0, 0.1, failure="gone")]
    found = figures.all_at_once([[stream(2.0)], [stream(1.0)], failed], [slow, fast, failed])
    assert found["decode_tokens_per_s"] == pytest.approx(1.0)
    assert found["prompt_tokens_per_s"] == pytest.approx(10.0)
    assert found["decode_tokens_per_s_by_difference"] == pytest.approx(2 / (3.0 - 1.0))
    assert found["inter_token_ms"] == {"p50": 1000, "p90": 2000, "p99": 2000}
    assert set(figures.all_at_once([failed], [failed]).values()) == {None}


def test_full_load_is_from_the_last_start_to_the_first_end():
    first = [stream(1.0, 2.0, sent=0.0), stream(3.0, 8.0, sent=2.0)]
    second = [stream(5.0, 6.0, sent=4.0, client=1), stream(7.0, 9.0, sent=6.0, client=1)]
    assert figures.full_load([first, second]) == (4.0, 8.0)
    assert figures.full_load([first[:1], second[1:]]) is None
    found = figures.sustained([first, second], (4.0, 8.0))
    assert found["requests_per_s"] == pytest.approx(2 / 4)
    assert found["output_tokens_per_s"] == pytest.approx(4 / 4)
    assert found["time_to_first_token_ms"] == {"p50": 1000, "p90": 1000, "p99": 1000}
    assert found["end_to_end_ms"] == {"p50": 2000, "p90": 3000, "p99": 3000}
    assert found["inter_token_p99_over_p50"] == 1


def test_what_became_of_the_requests():
    good = Record(0, 0.0, 1.0, [0.5], [1], 10, 4, 5, refused=2)
    silent = Record(0, 0.0, 1.0, [0.5], [3], 10, 3, None)
    found = figures.outcome([good, silent, Record(1, 0.0, 1.0, failure="gone"), Record(2, 0.0, 1.0, failure="gone")], 4)
    assert (found["requests"], found["failed"], found["failures"], found["refused"]) == (4, 2, {"gone": 2}, 2)
    assert (found["short"], found["found_share"], found["tokens_per_event"]) == (1, 0.5, 7 / 4)


def test_prompts_share_as_much_as_they_should():
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
    """Send chains from this process to a stub in it."""

    async def main() -> list[Record]:
        async with await stub.serve():
            client = Client(Target("127.0.0.1", stub.port, api_key="secret"))
            seen = await send_all(client, work, chains, make_bodies(work, chains), time.monotonic())
            client.close()
            # for both ends to close
            await asyncio.sleep(0.01)
            return figures.flat(seen)

    return asyncio.run(main())


def test_a_connection_carries_one_request_after_another():
    stub = Stub()
    records = send(stub, together("x", 2, 6, 4))
    assert [(record.failure, record.tokens, record.prompt, record.cached) for record in records] == [(None, 4, 6, 3)] * 6
    assert stub.connections == 2
    assert set(stub.keys) == {"Bearer secret"}
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in stub.asked)


def test_failures_are_counted_and_the_next_request_goes_on():
    stub = Stub("truncated", "error", "broken", "silent", "strange", "whole")
    records = send(stub, together("x", 1, 6, 4))
    assert [record.failure for record in records] == [
        "a stream broke off before its end",
        "error in the stream: out of pages",
        "HTTP 500: of our making",
        # the connection was kept, so that it is tried again on a new one
        "not HTTP: an answer that begins with b'SSH-2.0-OpenSSH\\r\\n'",
        None,
        None,
    ]


def test_a_refused_request_is_sent_again():
    (record,) = send(Stub("busy", "busy"), together("x", 1, 1, 4))
    assert (record.refused, record.failure, record.tokens) == (2, None, 4)


def test_a_kept_connection_that_the_server_closed_is_no_failure():
    stub = Stub("leaving", "leaving")
    assert [record.failure for record in send(stub, together("x", 1, 3, 4))] == [None] * 3
    assert stub.connections == 3


def test_answers_that_are_not_streamed():
    records = send(Stub(), together("x", 2, 2, 4), Work("stub", VOCAB, prompt=6, tokens=4, stream=False))
    assert [(record.failure, record.tokens, record.times) for record in records] == [(None, 4, [])] * 2


def test_requests_have_the_temperature_that_was_asked_for():
    asked = [json.loads(Work("stub", VOCAB, temperature=each).body("a", 4))["temperature"] for each in (0.0, 1.0)]
    assert asked == [0.0, 1.0]


def test_a_server_that_is_not_there():
    async def main() -> Record:
        return await Client(Target("127.0.0.1", server._free_port())).ask(b"{}", 0, 0.0, 5.0)

    assert asyncio.run(main()).failure == "connection refused"


def test_a_request_may_not_take_for_ever():
    async def main() -> Record:
        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async with await asyncio.start_server(hang, "127.0.0.1", 0) as listening:
            client = Client(Target("127.0.0.1", listening.sockets[0].getsockname()[1]))
            record = await client.ask(b"{}", 0, 0.0, 0.05)
            await asyncio.sleep(0.01)
            return record

    assert asyncio.run(main()).failure == "no whole answer within 0.05 s"


def test_a_level_measured_by_processes():
    with running(Stub("busy")) as url, Crew(parse_url(url), 2) as crew:
        row = levels.closed_level(crew.run, WORK, 2, levels.Amounts(requests=4, warmup=1), lambda text: None)
        later = levels.poisson_level(crew.run, WORK, 200.0, levels.Amounts(requests=5, warmup=0), lambda text: None)
    assert (row["clients"], row["requests"], row["failed"], row["short"], row["found_share"]) == (2, 6, 0, 0, 0.5)
    assert row["prompt_tokens_per_s"] > 0
    assert row["end_to_end_ms"]["p50"] >= row["time_to_first_token_ms"]["p50"]
    assert (later["rate"], later["requests"], later["failed"], later["decode_tokens_per_s"]) == (200.0, 5, 0, None)


def test_a_process_that_dies_is_an_error_of_one_sentence():
    with Crew(Target("127.0.0.1", 1), 1) as crew:
        crew._processes[0].kill()
        crew._processes[0].join()
        with pytest.raises(BackendError, match="a process that sends requests ended"):
            crew.run(WORK, together("x", 1, 1, 4))


STUB = [sys.executable, str(Path(__file__).with_name("load_stub.py"))]


def test_a_server_is_started_and_stopped(monkeypatch):
    monkeypatch.setattr(server, "COMMAND", STUB)
    with server.started(["--parallel", "8"], None, lambda text: None) as target:
        assert server.ask_models(target) == server.Served("stub", VOCAB, None)
    with pytest.raises(BackendError, match=r"no server answers at http://127.0.0.1:\d+: connection refused\."):
        server.ask_models(target)


def test_why_a_server_did_not_start(monkeypatch):
    monkeypatch.setattr(server, "COMMAND", STUB)
    with (
        pytest.raises(BackendError, match=r"ended before it was ready: there is no model\.$"),
        server.started(["--refuse"], None, lambda text: None),
    ):
        pass


def test_a_model_the_server_does_not_have():
    with running(Stub()) as url:
        assert server.ask_models(parse_url(url), "stub").model == "stub"
        with pytest.raises(InputError, match=r"has no model 'other'. Those it has: stub\."):
            server.ask_models(parse_url(url), "other")
