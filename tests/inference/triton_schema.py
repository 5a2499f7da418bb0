"""Of Triton's model_config.proto (triton-inference-server/common) what a repository of ours may say, as a message
class of protobuf: the parser of its text format refuses any other field, type or name of an enum.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ENUMS = {
    "DataType": {"TYPE_INT64": 9, "TYPE_FP16": 10, "TYPE_FP32": 11, "TYPE_STRING": 13},
    "Kind": {"KIND_AUTO": 0, "KIND_GPU": 1, "KIND_CPU": 2, "KIND_MODEL": 3},
}
# by message: name, number, type; * repeated, ? one of the ways to schedule
MESSAGES = {
    "Tensor": "name 1 string, data_type 2 DataType, dims 4 int64*",  # an output's dims are number 3
    "Group": "kind 4 Kind, count 2 int32, gpus 3 int32*, profile 5 string*",
    "Queue": "max_queue_size 4 uint32",
    "Batching": "preferred_batch_size 1 int32*, max_queue_delay_microseconds 2 uint64, default_queue_policy 5 Queue",
    "Pair": "key 1 string, value 2 string",
    "Step": "model_name 1 string, model_version 2 int64, input_map 3 Pair*, output_map 4 Pair*",
    "Ensembling": "step 1 Step*",
    "Sample": "data_type 1 DataType, dims 2 int64*, zero_data 3 bool",
    "Named": "key 1 string, value 2 Sample",
    "Warmup": "name 1 string, batch_size 2 uint32, inputs 3 Named*, count 4 uint32",
    "ModelConfig": "name 1 string, platform 2 string, backend 17 string, max_batch_size 4 int32, input 5 Tensor*, "
    "output 6 Tensor*, dynamic_batching 11 Batching?, ensemble_scheduling 15 Ensembling?, instance_group 7 Group*, "
    "model_warmup 16 Warmup*",
}


def model_config() -> type:
    """The class of a model's configuration."""
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    for name, values in ENUMS.items():
        file.enum_type.add(name=name).value.extend(
            [descriptor_pb2.EnumValueDescriptorProto(name="TYPE_INVALID", number=0)]
            * (0 not in values.values())
            + [descriptor_pb2.EnumValueDescriptorProto(name=one, number=i) for one, i in values.items()]
        )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        if "?" in fields:
            message.oneof_decl.add(name="scheduling_choice")
        for field in fields.split(", "):
            own, number, kind = field.split()
            word = kind.rstrip("*?")
            made = message.field.add(name=own, number=int(number), label=3 if kind.endswith("*") else 1)
            if word in MESSAGES or word in ENUMS:
                made.type, made.type_name = 14 if word in ENUMS else 11, f".inference.{word}"
            else:
                made.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{word.upper()}")
            if kind.endswith("?"):
                made.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))
