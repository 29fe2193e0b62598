"""A process that C++ code aborts says why, also while its main thread is busy in C."""

import signal
import subprocess
import sys

import pytest

from tests.conftest import REPO

SCRIPT = """
import ctypes, os, signal, sys, threading, time
from openpi_accel.parallel.last_words import LastWords

def speak():
    print("told", flush=True)
    return 134

libc = ctypes.CDLL(None)  # calls through it let other threads run, calls through PyDLL do not
words = LastWords(speak)
words.start()
{then}
"""


def run(then: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(then=then)], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "then",
    ["threading.Thread(target=libc.abort).start(); libc.sleep(30)", "libc.abort()"],
    ids=["in another thread", "in the main thread"],
)
def test_an_abort_is_told(then: str) -> None:
    assert run(then) == (134, "told\n")


def test_where_nobody_can_speak_the_abort_goes_on() -> None:
    assert run("ctypes.PyDLL(None).abort()") == (-signal.SIGABRT, "")  # no other Python thread runs any more


def test_an_orderly_end_leaves_no_word_and_no_handler() -> None:
    assert run("words.stop(); print('done', flush=True)") == (0, "done\n")
    assert run("words.stop(); os.abort()") == (-signal.SIGABRT, "")
