"""Speaks through a gateway with the clients that people have: grpc_clients.py HOST:PORT DIRECTORY.

NVIDIA's Riva client, and gRPC's own for health and reflection. Audio goes into files of the directory, everything
else as JSON to standard output. What the clients should do by themselves is asserted here; what the bytes are is the
caller's to check.
"""

import json
import pathlib
import sys
import time

import grpc
import riva.client
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from riva.client.proto import riva_tts_pb2

TEXT = "The ferry leaves the harbor at six."
SEED = {"seed": "7"}


def speak(address, directory):
    service = riva.client.SpeechSynthesisService(riva.client.Auth(uri=address))
    config = service.stub.GetRivaSynthesisConfig(riva_tts_pb2.RivaSynthesisConfigRequest()).model_config[0]
    subvoices = [voice.split(":")[0] for voice in config.parameters["subvoices"].split(",")]
    voice = f"{config.parameters['voice_name']}.{subvoices[0]}"

    whole = service.synthesize(TEXT, voice, sample_rate_hz=24000, custom_configuration=SEED)
    assert whole.meta.text == TEXT
    (directory / "whole.pcm").write_bytes(whole.audio)
    # As the client does it when nobody says otherwise: 22050 Hz, and no voice by name.
    default = service.synthesize(TEXT, custom_configuration=SEED)
    (directory / "default.pcm").write_bytes(default.audio)
    future = service.synthesize(TEXT, voice, future=True, sample_rate_hz=24000, custom_configuration=SEED)
    assert future.result(timeout=60).audio == whole.audio

    began = time.monotonic()
    arrivals = []
    with open(directory / "online.pcm", "wb") as file:
        for response in service.synthesize_online(TEXT, voice, sample_rate_hz=24000, custom_configuration=SEED):
            arrivals.append(time.monotonic() - began)
            file.write(response.audio)
    texts = []
    with open(directory / "texts.pcm", "wb") as file:
        two = service.synthesize_online([TEXT, "It is late."], voice, sample_rate_hz=24000, custom_configuration=SEED)
        for response in two:
            file.write(response.audio)
            if response.HasField("meta"):
                texts.append(response.meta.text)
    assert texts == [TEXT, "It is late."], texts

    # Who leaves in the middle of it: the place must be free behind this.
    leaving = service.synthesize_online(TEXT, voice, sample_rate_hz=24000)
    next(leaving)
    leaving.cancel()

    refused = {}
    for name, change in [
        ("voice_name", {"voice_name": "English-US.Female-1"}),
        ("language_code", {"language_code": "fr-FR"}),
        ("sample_rate_hz", {"sample_rate_hz": 12345}),
        ("encoding", {"encoding": riva.client.AudioEncoding.MULAW}),
        ("custom_dictionary", {"custom_dictionary": {"ferry": "fE@ri"}}),
        ("enable_word_time_offsets", {"enable_word_time_offsets": True}),
    ]:
        for call in [service.synthesize, lambda *args, **kwargs: list(service.synthesize_online(*args, **kwargs))]:
            try:
                call(TEXT, **change)
            except grpc.RpcError as error:
                refused.setdefault(name, []).append([error.code().name, error.details()])
            else:
                raise AssertionError(f"{change} was accepted")
    return {"voice": voice, "parameters": dict(config.parameters), "arrivals": arrivals, "refused": refused}


def check_health(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ["", "laneway.v1.Speech", "nvidia.riva.tts.RivaSpeechSynthesis"]:
        request = health_pb2.HealthCheckRequest(service=service)
        assert stub.Check(request, timeout=10).status == serving, service
        assert next(stub.Watch(request, timeout=10)).status == serving, service
    try:
        stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=10)
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.NOT_FOUND, error
    else:
        raise AssertionError("a service that there is not has a health")


def check_reflection(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    services = list(database.get_services())
    pool = DescriptorPool(database)
    found = pool.FindServiceByName("laneway.v1.Speech")
    assert {"Synthesize", "StreamSynthesize", "ListVoices"} <= {method.name for method in found.methods}
    # The protocol as its own client has it: same file, names, numbers and types.
    for file in ["riva_tts", "riva_audio", "riva_common"]:
        module = sys.modules[f"riva.client.proto.{file}_pb2"]
        ours = database.FindFileByName(f"riva/proto/{file}.proto")
        theirs = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(theirs)
        for each in [ours, theirs]:
            for message in all_messages(each.message_type):
                for field in message.field:
                    field.ClearField("json_name")
            each.ClearField("source_code_info")
            for service in each.service:
                for method in service.method:
                    method.ClearField("options")
        assert ours == theirs, f"{file}: {ours} is not {theirs}"
    return services


def all_messages(messages):
    for message in messages:
        yield message
        yield from all_messages(message.nested_type)


def main(address, directory):
    said = speak(address, pathlib.Path(directory))
    with grpc.insecure_channel(address) as channel:
        check_health(channel)
        said["services"] = check_reflection(channel)
    json.dump(said, sys.stdout)


main(*sys.argv[1:])
