"""Unmodified programs as users run them: a plain ``criuctl dump PID`` and a plain ``criuctl
restore``, no option given.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from urllib.request import urlopen

import pytest
from servers.common import free_ports
from support import oracle
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration


def need(program: str) -> str:
    """The program's path; a machine without it is not set up for these tests (scripts/setup --dev
    installs them).
    """
    found = shutil.which(program)
    if found is None:
        pytest.fail(f"{program} is not installed; scripts/setup --dev does it")
    return found


def get(url: str) -> bytes:
    data: bytes = urlopen(url, timeout=60).read()
    return data


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def back(trip: Trip, animal: Animal, *ignore: str, restless: bool = False) -> Animal:
    """Dump it, restore it; before, let it see that the connections of earlier questions are closed.

    Unless it is `restless`, all of it is first on its place, where it waits: a program that is
    about to be executed has other descriptors a moment later.
    """

    def connections() -> list[str]:
        found = [
            d
            for p in oracle.snapshot(animal.pid, memory=False).values()
            for d in p.get("descriptors", {}).values()
        ]
        return [d["peer"] for d in found if d.get("tcp_state", 10) != 10]

    if not restless:
        animal.rest()
    wait_until(lambda: not connections(), 60, f"{animal!r} has closed its connections")
    if not restless:
        animal.rest()
    return trip.restore(trip.dump(animal), animal, ignore=ignore)


def test_a_shell_script_with_jobs(zoo: Zoo, trip: Trip) -> None:
    """A loop, a background job, a stopped job, a pipeline: variables and job control survive."""
    script = """
        set -m
        sleep 1000 & sleep 1001 | cat & sleep 1002 &
        kill -STOP %3
        n=0
        trap 'n=$((n+1)); jobs > jobs.$n; kill -CONT %3
            echo $n > count.new; mv count.new count' USR1
        echo started > up
        while :; do wait; done
    """
    animal = zoo.launch(["bash", "-c", script], name="shell", quiet=False)
    wait_until((animal.folder / "up").exists, 60, "the script is up")
    wait_until(
        lambda: any(oracle.stat_of(pid)[:1] == ["T"] for pid in oracle.tree(animal.pid)),
        60,
        "one is stopped",
    )
    count = animal.folder / "count"

    def ask(number: int) -> str:
        os.kill(animal.pid, signal.SIGUSR1)
        wait_until(
            lambda: count.exists() and count.read_text() == f"{number}\n", 60, f"answer {number}"
        )
        return (animal.folder / f"jobs.{number}").read_text()

    # That its job stops once more, now by CRIU, may reach the shell as SIGCHLD, which it takes in
    # its stride.
    animal = back(trip, animal, "*/status/ShdPnd")
    jobs = ask(1)
    assert jobs.count("Running") == 2
    assert "Stopped" in jobs
    assert ask(2).count("Running") == 3


def test_a_repl_that_reads_from_a_fifo(zoo: Zoo, trip: Trip) -> None:
    """An interactive Python with a variable, an open generator and half a line of input."""
    fifo, log = zoo.home / "input", zoo.home / "answers"
    os.mkfifo(fifo)
    code = f"""if 1:
        import code, os
        held = os.open({str(fifo)!r}, os.O_RDWR)
        console = code.InteractiveConsole({{"out": open({str(log)!r}, "a", buffering=1)}})
        source = os.fdopen(held, "r", buffering=1)
        while line := source.readline():
            console.push(line.rstrip("\\n"))
    """
    animal = zoo.launch([sys.executable, "-S", "-u", "-c", code], name="repl", quiet=False)

    def type_in(text: str) -> None:
        fd = os.open(fifo, os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)

    def said(text: str) -> None:
        wait_until(
            lambda: log.exists() and log.read_text().endswith(text), 60, f"{text!r} in {log}"
        )

    type_in(
        "x = {'answer': 41}\nsquares = (n * n for n in range(100))\n"
        "_ = [next(squares) for _ in range(5)]\n_ = out.write('ready\\n')\n"
    )
    said("ready\n")
    type_in("x['answer'] += ")
    animal = back(trip, animal)
    type_in("1\n_ = out.write(f\"{x['answer']} {next(squares)}\\n\")\n")
    said("42 25\n")


def test_node_http_server(zoo: Zoo, trip: Trip) -> None:
    """V8's heap and JIT, libuv's epoll and threads, a timer."""
    (port,) = free_ports(1)
    node = need("node")
    script = f"""
        let hits = 0, ticks = 0; setInterval(() => ticks++, 20);
        require('http').createServer((q, r) => {{
            if (q.url == '/hit') hits++;
            r.end(JSON.stringify({{hits, ticks}}));
        }}).listen({port}, '127.0.0.1');
    """
    animal = zoo.launch([node, "-e", script], name="node", quiet=False)
    wait_until(lambda: answers(port), 60, "node listens")
    for _ in range(3):
        get(f"http://127.0.0.1:{port}/hit")
    animal = back(trip, animal, restless=True)
    first = json.loads(get(f"http://127.0.0.1:{port}/hit"))
    assert first["hits"] == 4
    wait_until(
        lambda: json.loads(get(f"http://127.0.0.1:{port}/"))["ticks"] > first["ticks"],
        60,
        "the timer ticks",
    )


def test_redis(zoo: Zoo, trip: Trip) -> None:
    """Its keys, its expiry, its append-only file; a client outside sees the end and comes back by
    itself.
    """
    (port,) = free_ports(1)
    server = need("redis-server")
    animal = zoo.launch(
        [server, "--port", str(port), "--bind", "127.0.0.1", "--appendonly", "yes", "--save", ""],
        name="redis",
        quiet=False,
    )
    wait_until(lambda: answers(port), 60, "redis listens")

    def redis(*words: str) -> str:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(
                f"*{len(words)}\r\n".encode()
                + b"".join(f"${len(w)}\r\n{w}\r\n".encode() for w in words)
            )
            return sock.recv(4096).decode().strip()

    assert redis("SET", "kept", "value") == "+OK"
    assert redis("SET", "fleeting", "x", "EX", "3000") == "+OK"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"PING\r\n")
        assert client.recv(64) == b"+PONG\r\n"
        # the client's connection is hung up: a difference that is meant
        trip.restore(trip.dump(animal), animal, equal=False)
    assert redis("GET", "kept") == "$5\r\nvalue"
    assert redis("INCR", "counter") == ":1"
    assert 2900 < int(redis("TTL", "fleeting")[1:]) <= 3000
    assert (
        "SET" in (animal.folder / "appendonlydir" / "appendonly.aof.1.incr.aof").read_text()
        if (animal.folder / "appendonlydir").exists()
        else "kept" in (animal.folder / "appendonly.aof").read_text()
    )


def test_nginx_with_workers(zoo: Zoo, trip: Trip) -> None:
    """A master and two workers that share a listening socket and memory."""
    (port,) = free_ports(1)
    nginx = need("nginx")
    folder = zoo.home / "nginx"
    folder.mkdir()
    (folder / "page").write_text("served")
    (folder / "nginx.conf").write_text(f"""
        user root; worker_processes 2; daemon off; pid {folder}/pid; error_log {folder}/error.log;
        events {{ worker_connections 64; }}
        http {{
            access_log {folder}/access.log;
            client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
            fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
            limit_req_zone $binary_remote_addr zone=z:1m rate=1000r/s;
            server {{ listen 127.0.0.1:{port}; root {folder}; }}
        }}
    """)
    animal = zoo.launch(
        [nginx, "-c", str(folder / "nginx.conf"), "-p", str(folder)], name="nginx", quiet=False
    )
    wait_until(lambda: answers(port), 60, "nginx listens")
    assert get(f"http://127.0.0.1:{port}/page") == b"served"
    wait_until(lambda: len(oracle.tree(animal.pid)) == 3, 60, "both workers are there")
    animal = back(trip, animal)
    assert [get(f"http://127.0.0.1:{port}/page") for _ in range(8)] == [b"served"] * 8
    workers = set(oracle.tree(animal.pid)) - {animal.pid}

    def reloaded() -> bool:
        # the old workers are there too, until they have nothing to do any more
        tree = oracle.tree(animal.pid)
        return len(tree) == 3 and workers.isdisjoint(tree)

    os.kill(animal.pid, signal.SIGHUP)  # reload: the restored master starts new workers
    wait_until(reloaded, 60, "reloaded")
    assert get(f"http://127.0.0.1:{port}/page") == b"served"
    wait_until(
        lambda: len((folder / "access.log").read_text().splitlines()) >= 10,
        60,
        "every answer is in the log",
    )


def test_make_in_the_middle_of_a_build(zoo: Zoo, trip: Trip) -> None:
    """make -j2 with a job server, a compiler that reads from a FIFO: held in the middle, finished
    afterwards.
    """
    make, gcc = need("make"), need("gcc")
    folder = zoo.home / "make"
    folder.mkdir()
    os.mkfifo(folder / "gate")
    (folder / "main.c").write_text('#include "made.h"\nint main(void) { return MADE - 42; }\n')
    (folder / "Makefile").write_text(
        "all: program other.o\n"
        "made.h:\n\tcat gate > made.h\n"
        f"other.o:\n\techo 'int other;' | {gcc} -x c -c -o $@ -\n"
        f"program: main.c made.h\n\t{gcc} -O2 -o $@ main.c\n"
    )
    animal = zoo.launch([make, "-j2"], name="make", quiet=False)

    def waits() -> bool:
        """Whether the one command is finished and reaped (who is not has no command line), and only
        the other is left.
        """
        running = [oracle.read(f"/proc/{pid}/cmdline") for pid in oracle.tree(animal.pid)]
        done = (
            (folder / "other.o").exists()
            and all(running)
            and not any("int other" in each for each in running)
        )
        return done and "cat\0gate\0" in running

    wait_until(waits, 60, "make waits for made.h")
    animal = back(trip, animal)
    (folder / "gate").write_text("#define MADE 42\n")
    wait_until(lambda: not animal.alive(), 60, "the build is finished")
    assert subprocess.run([folder / "program"], check=False).returncode == 0


def test_java(zoo: Zoo, trip: Trip) -> None:
    """A JVM with its garbage collector and compiler threads."""
    need("javac")
    (port,) = free_ports(1)
    source = zoo.home / "Counter.java"
    source.write_text(f"""
        import java.io.*; import java.net.*;
        public class Counter {{
            public static void main(String[] a) throws Exception {{
                int n = 0; InetAddress here = InetAddress.getByName("127.0.0.1");
                ServerSocket s = new ServerSocket({port}, 5, here);
                while (true) {{ try (Socket c = s.accept()) {{
                    c.getOutputStream().write(("" + ++n).getBytes()); System.gc(); }} }} }} }}
    """)
    animal = zoo.launch(["java", "-Xmx64m", str(source)], name="java", quiet=False)

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            return sock.recv(64)

    wait_until(lambda: answers(port), 60, "java listens")
    first = int(ask())
    animal = back(trip, animal, restless=True)
    assert int(ask()) == first + 1


def test_tail_follows_on(zoo: Zoo, trip: Trip) -> None:
    """``tail -F`` waits in inotify: it must go on following after the restore, not end with
    EINTR.
    """
    log = zoo.home / "followed"
    log.write_text("one\n")
    animal = zoo.launch(["tail", "-n", "+1", "-F", str(log)], name="tail", quiet=False)
    wait_until(lambda: animal.output() == "one\n", 60, "tail has begun")
    animal = back(trip, animal)
    with log.open("a") as file:
        file.write("two\n")
    wait_until(lambda: animal.output() == "one\ntwo\n", 60, "tail goes on")
    log.rename(log.with_name("rotated"))
    log.write_text("three\n")
    wait_until(lambda: animal.output().endswith("three\n"), 60, "tail follows the name")


def test_sqlite_shell_in_a_transaction(zoo: Zoo, trip: Trip) -> None:
    """The sqlite3 program with a transaction open, its input a FIFO."""
    sqlite3 = need("sqlite3")
    fifo, database = zoo.home / "sql", zoo.home / "data.db"
    os.mkfifo(fifo)
    animal = zoo.launch(
        ["sh", "-c", f'exec 3<>"{fifo}"; exec {sqlite3} "{database}" <&3'],
        name="sqlite3",
        quiet=False,
    )

    def sql(text: str) -> None:
        fifo.write_text(text + "\n")

    sql("CREATE TABLE t (n); BEGIN; INSERT INTO t VALUES (1); SELECT 'begun';")
    wait_until(lambda: "begun" in animal.output(), 60, "the transaction has begun")
    animal = back(trip, animal)
    sql("INSERT INTO t VALUES (2); COMMIT; SELECT 'rows ' || count(*) FROM t;")
    wait_until(lambda: "rows 2" in animal.output(), 60, "the transaction is committed")


def _pipeline(count: int) -> Callable[[Zoo], Animal]:
    return lambda zoo: zoo.launch(
        ["sh", "-c", " | ".join(["sleep 1000", *["cat"] * count])], name="pipeline", quiet=False
    )


@pytest.mark.slow
def test_a_hundred_processes(zoo: Zoo, trip: Trip) -> None:
    """A pipeline of a hundred: every pipe still joins the same two."""
    animal = _pipeline(99)(zoo)
    wait_until(lambda: len(oracle.tree(animal.pid)) == 101, 60, "a hundred processes")
    animal = back(trip, animal)
    assert len(oracle.tree(animal.pid)) == 101
