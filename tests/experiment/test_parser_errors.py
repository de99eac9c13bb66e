"""Messages of the parser that commands rarely cause: each becomes one line that names the key and dumps nothing."""

from __future__ import annotations

import re

import pytest

from lipdp_lightning.experiment.parser_errors import parser_error

OBJECT = "Namespace(class_path='a.B', init_args=Namespace(size=3, other=Namespace(x=1)))"
UNION = """Parser key "trainer.devices":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'int'>, <class 'str'>]
  Errors:
    - Expected a <class 'int'>
    - Expected a <class 'str'>
  Given value type: <class 'jsonargparse._namespace.Namespace'>
  Given value: {value}
"""
NESTED = """Parser key "model.network":
  Problem with given class_path 'own.Net':
    Parser key "size":
      Expected a <class 'int'>. Got value: {value}
"""
MESSAGES = {
    "a dumped object": (UNION.format(value=OBJECT), "trainer.devices: this is not a whole number or text. HINT"),
    "a plain value": (UNION.format(value="[1, 2]"), "trainer.devices: '[1, 2]' is not a whole number or text. HINT"),
    "a dumped object inside a class": (NESTED.format(value=OBJECT), "model.network.init_args.size: this is not a"),
    "a class": (
        "Parser key \"data\":\n  Type <class 'own.Rows'> and\n  <class 'own.Data'> clash",
        "data: Type own.Rows and; own.Data clash. HINT",
    ),
    "an object in memory": (
        'Parser key "data":\n  <own.rows.Rows object at 0x7f00aa>   is closed', "data: Rows is closed. HINT",
    ),
    "many lines": (
        'Parser key "data":\n' + "".join(f"  {number} {'x' * 40}\n" for number in range(40)), "data: 0 xxxx",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_becomes_one_line_with_the_key_and_without_dumps(name: str) -> None:
    message, expected = MESSAGES[name]
    line = parser_error(message)
    assert line.startswith(expected) and "HINT: " in line
    assert "\n" not in line and len(line) <= 500
    assert not re.search(r"Namespace|<class|object at 0x| {2}", line)
