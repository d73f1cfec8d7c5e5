"""One run of the benchmark: finds or starts the servers, runs the workloads on each in turn, collects the results."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Callable, Iterator

import msgspec

from tureen.bench.backends import BACKENDS, ServerKind
from tureen.bench.drive import ask, run_load
from tureen.bench.http import Address, BenchError, ClientConnection
from tureen.bench.machine import memory_reads
from tureen.bench.process import StartedServer, cpu_seconds, listener, memory
from tureen.bench.report import ColdStart, Goals, Result, summarise, ttft
from tureen.bench.structured import json_jobs, plain_jobs, share_valid
from tureen.bench.workloads import (
    MIXED_LOADS,
    BenchRequest,
    Dice,
    OfferedLoad,
    TimedPass,
    make_load,
    mixed_jobs,
    shapes,
)
from tureen.server import fastest_event_loop

WARM_UP = TimedPass(name="warm-up", prompt_len=32, output_len=8, requests=4, concurrency=2)
MIXED_REQUESTS = {True: 16, False: 64}  # by --quick
MIXED_CONCURRENCY = 64
JSON_CONCURRENCY = (1, 16)
SETTLE_S = 0.5

Say = Callable[[str], None]


class TargetSpec(msgspec.Struct, frozen=True):
    """A server to be measured, as the command line names it."""

    name: str
    backend: str
    url: str
    start: str | None = None
    pid: int | None = None


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run, as the command line has them. None = the workload's own value."""

    targets: list[TargetSpec]
    workloads: list[str]
    rounds: int = 1
    concurrency: int | None = None
    requests: int | None = None
    rate: float | None = None
    seed: int | None = None
    vocab_size: int | None = None
    quick: bool = False
    api_key: str | None = None
    goals: Goals = Goals(2000.0, 200.0)


class Outcome(msgspec.Struct):
    """Everything that a run measured."""

    seed: int
    plan: BenchPlan
    cold_starts: dict[str, ColdStart] = {}
    results: list[Result] = []


class TargetServer:
    """A server that answers."""

    def __init__(
        self, spec: TargetSpec, backend: ServerKind, address: Address, vocab_size: int, pid: int | None
    ) -> None:
        self.name = spec.name
        self.backend = backend
        self.address = address
        self.vocab_size = vocab_size
        self.pid = pid


def run_plan(plan: BenchPlan, say: Say) -> Outcome:
    """Runs the plan; `say` gets a line about each pass as it ends. Started servers are always stopped.

    Raises BenchError.
    """
    with asyncio.Runner(loop_factory=fastest_event_loop()) as runner:
        try:
            return runner.run(_Session(plan, say).run())
        except asyncio.CancelledError:
            raise BenchError("ended by SIGTERM; nothing was written") from None


class _Session:
    def __init__(self, plan: BenchPlan, say: Say) -> None:
        self.plan = plan
        self.say = say
        self.outcome = Outcome(secrets.randbits(32) if plan.seed is None else plan.seed, _for_the_record(plan))
        self.servers: list[StartedServer] = []

    async def run(self) -> Outcome:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            targets = [await self._open(spec) for spec in self.plan.targets]
            for workload in self.plan.workloads:
                passes = {"mixed": self._mixed, "json": self._json}.get(workload)
                await (self._plain(targets, workload) if passes is None else passes(targets))
        finally:
            for server in self.servers:
                server.stop()
        return self.outcome

    async def _open(self, spec: TargetSpec) -> TargetServer:
        address = Address(spec.url, api_key=self.plan.api_key)
        backend = BACKENDS[spec.backend]()
        server = await self._start(spec) if spec.start is not None else None
        ready_s = await server.ready(address) if server else 0.0
        connection = ClientConnection(address)
        try:
            vocab_size = await backend.prepare(connection)
            vocab_size = self.plan.vocab_size or vocab_size
            if vocab_size is None:
                raise BenchError(f"{spec.url} does not report its vocabulary size: give --vocab N")
            dice = Dice(vocab_size, self.outcome.seed, "warm-up", spec.name)
            if server:
                cold_start = await _first_request(server, ready_s, connection, backend, dice)
                self.outcome.cold_starts[spec.name] = cold_start
                self.say(f"{spec.name}: ready after {ready_s:.2f} s, first token {cold_start.first_token_s:.2f} s")
        except ConnectionRefusedError:
            raise BenchError(
                f"no server answers at {spec.url}: start one with tureen serve, or give --start 'tureen serve', or "
                "--url URL; --workload offline needs none"
            ) from None
        except OSError as error:
            raise BenchError(f"{spec.url}: {error}") from None
        finally:
            connection.close()
        await run_load(address, backend, make_load(WARM_UP, dice))
        pid = spec.pid or (server.pid if server else listener(address.port) if _is_local(address) else None)
        return TargetServer(spec, backend, address, vocab_size, pid)

    async def _start(self, spec: TargetSpec) -> StartedServer:
        if listener(Address(spec.url).port) is not None:
            raise BenchError(f"--start for {spec.name}: something listens on {spec.url} already")
        self.servers.append(StartedServer(spec.start or ""))
        return self.servers[-1]

    async def _plain(self, targets: list[TargetServer], workload: str) -> None:
        plan = self.plan
        for shape in shapes(workload, quick=plan.quick, requests=plan.requests, concurrency=plan.concurrency):
            for number, target in self._turns(targets):
                dice = self._dice(target, shape.name, number)
                await self._pass(target, make_load(shape, dice, rate=plan.rate), number, plan.rate)

    async def _mixed(self, targets: list[TargetServer]) -> None:
        """Measures the capacity first, then arrivals at shares of it; with --rate at that rate only."""
        plan = self.plan
        count = plan.requests or MIXED_REQUESTS[plan.quick]
        concurrency = plan.concurrency or MIXED_CONCURRENCY
        for number, target in self._turns(targets):
            dice = self._dice(target, "mixed", number)
            rates = {"mixed-rate": plan.rate} if plan.rate else {}
            if not rates:
                load = OfferedLoad(name="mixed-capacity", jobs=mixed_jobs(dice, count), concurrency=concurrency)
                capacity = (await self._pass(target, load, number)).request_s
                rates = {f"mixed-{share:.0%}": share * capacity for share in MIXED_LOADS}
            for name, rate in rates.items():
                load = OfferedLoad(
                    name=name,
                    jobs=mixed_jobs(dice, count),
                    concurrency=concurrency,
                    arrivals_s=dice.arrivals(count, rate),
                    may_refuse=True,
                )
                await self._pass(target, load, number, rate)

    async def _json(self, targets: list[TargetServer]) -> None:
        """Objects with schemas seen before, as many tokens without a schema, and objects with schemas never seen."""
        plan = self.plan
        for target in targets:
            seen = OfferedLoad(name="json-seen", jobs=json_jobs(self._dice(target, "json-seen"), 3), concurrency=1)
            await run_load(target.address, target.backend, seen)
        for concurrency in (plan.concurrency,) if plan.concurrency else JSON_CONCURRENCY:
            name = f"json-{concurrency}"
            count = plan.requests or (max(concurrency, 3) if plan.quick else 3 * max(concurrency, 4))
            for number, target in self._turns(targets):
                jobs = json_jobs(self._dice(target, name, number), count)
                result = await self._json_pass(target, name, concurrency, jobs, number)
                length = max(1, round(result.output_tokens / count))
                jobs = plain_jobs(self._dice(target, name, "plain", number), count, length)
                await self._json_pass(target, f"{name}-plain", concurrency, jobs, number)
                jobs = json_jobs(self._dice(target, name, "new", number), count, are_new=True)
                await self._json_pass(target, f"{name}-new", concurrency, jobs, number)

    async def _json_pass(
        self, target: TargetServer, name: str, concurrency: int, jobs: list[BenchRequest], number: int
    ) -> Result:
        rate = self.plan.rate
        arrivals = None if rate is None else self._dice(target, name, "arrivals", number).arrivals(len(jobs), rate)
        load = OfferedLoad(name=name, jobs=jobs, concurrency=concurrency, arrivals_s=arrivals)
        return await self._pass(target, load, number, rate)

    async def _pass(self, target: TargetServer, load: OfferedLoad, number: int, rate: float | None = None) -> Result:
        reads = memory_reads()
        server_cpu, client_cpu = cpu_seconds(target.pid), time.process_time()
        answers = await run_load(target.address, target.backend, load)
        client_cpu = time.process_time() - client_cpu
        server_cpu_now = cpu_seconds(target.pid)
        result = summarise(
            answers,
            workload=load.name,
            target=target.name,
            round_number=number,
            concurrency=None if load.arrivals_s else load.concurrency,
            rate=rate,
            goals=self.plan.goals if load.arrivals_s else None,
        )
        result.valid = share_valid(load.jobs, answers)
        result.client_cpu_s = round(client_cpu, 3)
        if server_cpu is not None and server_cpu_now is not None:
            result.server_cpu_s = round(server_cpu_now - server_cpu, 2)
        result.memory_mib = memory(target.pid)
        result.memory_reads = reads
        self.outcome.results.append(result)
        self.say(f"{result.workload} · {result.target} · {result.seconds:.1f} s · {result.output_tok_s:.0f} tok/s")
        return result

    def _turns(self, targets: list[TargetServer]) -> Iterator[tuple[int, TargetServer]]:
        """Yields the targets in turn, A B A B …: what changes with time on the machine then falls on all alike."""
        for number in range(self.plan.rounds):
            for target in targets:
                yield number, target

    def _dice(self, target: TargetServer, *what: object) -> Dice:
        return Dice(target.vocab_size, self.outcome.seed, target.name, *what)


async def _first_request(
    server: StartedServer, ready_s: float, connection: ClientConnection, backend: ServerKind, dice: Dice
) -> ColdStart:
    when_ready = memory(server.pid)
    answer = await ask(connection, backend, BenchRequest(dice.token_ids(WARM_UP.prompt_len), 1))
    await asyncio.sleep(SETTLE_S)
    return ColdStart(
        ready_s=round(ready_s, 3),
        first_token_s=round(ready_s + ttft(answer), 3),
        memory_when_ready=when_ready,
        memory_at_rest=memory(server.pid),
    )


def _for_the_record(plan: BenchPlan) -> BenchPlan:
    """Returns the plan without the key, and without this machine's folders in the commands."""
    targets = [
        msgspec.structs.replace(
            spec, start=spec.start and " ".join(word.rsplit("/", 1)[-1] for word in spec.start.split())
        )
        for spec in plan.targets
    ]
    return msgspec.structs.replace(plan, api_key=None, targets=targets)


def _is_local(address: Address) -> bool:
    return address.host in ("127.0.0.1", "localhost", "::1", "0.0.0.0")
