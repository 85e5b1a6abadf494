import json
import logging

from workers.engine.logs import JsonFormatter


def line(message="hello %s", args=("you",), exc_info=None, **extra):
    record = logging.makeLogRecord({"levelname": "INFO", "msg": message, "args": args, "exc_info": exc_info, **extra})
    return JsonFormatter("worker-1").format(record)


def test_a_record_is_one_json_object_with_its_extras():
    found = json.loads(line(event="link_lost", link=3))
    assert (found["event"], found["msg"], found["link"]) == ("link_lost", "hello you", 3)
    assert (found["level"], found["worker"]) == ("INFO", "worker-1")


def test_hostile_text_stays_on_one_line_and_is_cut():
    text = "a\nb\u2028c\x1b[31m" + "x" * 5000
    found = line("%s", (text,), note=text)
    assert found.isprintable()
    assert len(json.loads(found)["note"]) == 1024


def test_a_traceback_goes_along():
    try:
        raise ValueError("inside")
    except ValueError as error:
        found = json.loads(line(exc_info=(type(error), error, error.__traceback__)))
    assert "ValueError: inside" in found["traceback"]
