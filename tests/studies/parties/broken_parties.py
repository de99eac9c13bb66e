"""Parties and servers that break off or lie, for the processes of `test_parties_processes`."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace

from lipdp_lightning.privacy.keys import new_secret
from lipdp_lightning.studies.parties.roles import Server, collect_messages, deliver, end_after, run_party, run_server
from lipdp_lightning.studies.parties.secure_aggregation import ShareRandomness
from lipdp_lightning.studies.parties.transport import HOST, OPEN, call, new_identities

BROKEN = "party 1"


def vanishes_at_once(setting, identity, ports, row, report):
    if identity.name != BROKEN:
        run_party(setting, identity, ports, row, report)
    os._exit(0)


def vanishes_between_servers(setting, identity, ports, row, report):
    if identity.name != BROKEN:
        return run_party(setting, identity, ports, row, report)
    shares = setting.protocol.share(setting.statistic, row, ShareRandomness(new_secret(), setting.session))
    deliver(setting, identity, 0, ports[0], shares[0][0].tobytes())
    os._exit(0)


def vanishes_in_a_message(setting, identity, ports, row, report):
    if identity.name != BROKEN:
        return run_party(setting, identity, ports, row, report)
    for server, port in enumerate(ports):
        connection = socket.create_connection((HOST, port), timeout=5)
        call(connection, identity, f"server {server}", setting.session)
        connection.sendall(b"\x00\x00\x00\x40\x01half")
        connection.close()
    os._exit(0)


def stays_silent(setting, identity, ports, row, report):
    if identity.name != BROKEN:
        return run_party(setting, identity, ports, row, report)
    end_after(setting.seconds)
    time.sleep(600)


def takes_anothers_name(setting, identity, ports, row, report):
    if identity.name != BROKEN:
        return run_party(setting, identity, ports, row, report)
    forged = replace(identity, private=new_identities([BROKEN])[BROKEN].private)
    run_party(setting, forged, ports, row, report)


def sends_twice(setting, identity, ports, row, report):
    if identity.name == BROKEN:
        for server, port in enumerate(ports):
            shares = setting.protocol.share(setting.statistic, row, ShareRandomness(new_secret(), setting.session))
            deliver(setting, identity, server, port, shares[server][0].tobytes())
            break
    run_party(setting, identity, ports, row, report)


def server_1_never_starts(setting, identity, index, report):
    if index != 1:
        run_server(setting, identity, index, report)


def server_1_vanishes_at_the_opening(setting, identity, index, report):
    if index != 1:
        return run_server(setting, identity, index, report)
    server = Server(setting, identity, index)
    with socket.create_server((HOST, 0)) as listener:
        report.send(listener.getsockname()[1])
        collect_messages(server, listener).receive(OPEN)
    os._exit(0)
