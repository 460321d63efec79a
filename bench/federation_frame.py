"""Counts what crosses the network between relays and the SuperLink, for bench/federation.py: with TLS and HTTP."""

import socket
import threading
from contextlib import suppress

from fedsieve.federation.loopback import HOST, Loopback


class CountedLoopback(Loopback):
    """Relays reach the SuperLink through a proxy that counts bytes in both directions."""

    up = down = 0

    def start_superlink(self) -> None:
        super().start_superlink()
        self._listener = socket.create_server((HOST, 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def place(self) -> str:
        return f"{HOST}:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                relay, _ = self._listener.accept()
                superlink = socket.create_connection((HOST, self.ports[0]))
                for one in (relay, superlink):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
                threading.Thread(target=self._carry, args=(relay, superlink, "up"), daemon=True).start()
                threading.Thread(target=self._carry, args=(superlink, relay, "down"), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                setattr(self, way, getattr(self, way) + len(data))
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        super().close()
        self._listener.close()
