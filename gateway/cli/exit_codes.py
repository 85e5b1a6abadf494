"""The statuses with which a command ends. docs/cli.md has this table, and a test holds it."""

from __future__ import annotations

import os
import signal

OK, FAILED, USAGE, FAULT, CONFIG = 0, 1, 2, os.EX_SOFTWARE, os.EX_CONFIG
INTERRUPTED, CLOSED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGPIPE, 128 + signal.SIGTERM

MEANINGS = {
    OK: "The command did what was asked.",
    FAILED: "The command was refused, a check failed, something does not answer, or the question was answered with no.",
    USAGE: "The command line cannot be understood: an unknown command or option, or a value of a wrong form.",
    FAULT: "Headgate itself is at fault. The sentence names the error; `HEADGATE_TRACEBACK=1` shows where it comes from.",
    CONFIG: "A setting cannot be used: a variable, a line of headgate.toml, or a file that one of them names. Or the schema of the database is newer than this program.",
    INTERRUPTED: "Ctrl-C ended the command. `up`, `top` and `requests follow`, which only Ctrl-C ends, end with 0.",
    TERMINATED: "SIGTERM ended `backup` or `restore`, after they had removed their temporary files.",
    CLOSED: "The reader of the output went away before its end, as `head` does.",
}
