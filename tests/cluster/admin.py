"""The conductor's Admin service without batonctl, for tests in which something is to happen before a stream ends: a call
takes milliseconds, where a new process takes as long as some hundred tokens."""
import importlib
import os
import subprocess
import sys
import tempfile

import grpc

from local_cluster import ROOT
from sanitizer import PATIENCE


class Admin:
    def __init__(self, addr):
        with tempfile.TemporaryDirectory(prefix="baton-pb2-") as made:
            subprocess.run(["protoc", f"--proto_path={ROOT}/proto", f"--python_out={made}",
                            *(os.path.join(ROOT, "proto", f"{name}.proto") for name in ("cluster", "session", "admin"))], check=True)
            sys.path.insert(0, made)
            self.pb = importlib.import_module("admin_pb2")
            sys.path.remove(made)
        self.channel = grpc.insecure_channel(addr)

    def drain(self, node, **more):
        """more: undrain, force."""
        pb = self.pb
        call = self.channel.unary_unary("/baton.Admin/Drain", request_serializer=pb.AdminDrainRequest.SerializeToString,
                                        response_deserializer=pb.AdminDrain.FromString)
        return call(pb.AdminDrainRequest(node=node, **more), timeout=20 * PATIENCE)

    def undrain(self, node):
        return self.drain(node, undrain=True)

    def close(self):
        self.channel.close()
