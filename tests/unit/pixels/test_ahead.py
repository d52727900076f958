"""Threads that work ahead, where another thread goes on after the main one, and as a process ends."""

import subprocess
import sys

import pytest

PROGRAM = """
import itertools, threading, time
from fusedvit.pixels.ahead import pool_of, started_ahead

def added():
    with pool_of(2, "ahead") as pool:
        return sum(task.result() for task in started_ahead(pool, [lambda: 1] * 20, 4))

def after_the_main_thread():
    threading.main_thread().join()
    print(added())

def a_call_that_fails():
    threading.main_thread().join()
    with pool_of(2, "ahead") as pool:
        one, two = started_ahead(pool, [lambda: 1, lambda: 1 / 0], 4)
        print(one.result(), type(two.exception()).__name__)

def for_ever():
    with pool_of(2, "ahead") as pool:
        for task in started_ahead(pool, itertools.repeat(lambda: time.sleep(0.01)), 4):
            task.result()
"""
STARTS = {  # what a program starts, and what it prints
    "threading.Thread(target=after_the_main_thread).start()": "20\n",
    "threading.Thread(target=a_call_that_fails).start()": "1 ZeroDivisionError\n",
    "threading.Thread(target=for_ever, daemon=True).start(); time.sleep(0.2)": "",
}


@pytest.mark.parametrize("start", STARTS)
def test_threads_that_the_main_thread_leaves(start: str) -> None:
    command = [sys.executable, "-c", PROGRAM + start]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=100)
    assert (found.stdout, found.returncode) == (STARTS[start], 0)
