"""Writes tests/it/formats/fixtures.json: records encoded by Confluent's Python client, for the tests of the formats.

Needs `pip install 'confluent-kafka[avro,protobuf,json,schemaregistry]'`. Run it from the root of the repository:
`python3 tests/it/formats/fixtures.py > tests/it/formats/fixtures.json`.
"""

import base64
import datetime
import decimal
import json
import sys

from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

registry = SchemaRegistryClient.new_client({"url": "mock://fixtures"})
records = {}


def keep(name, encoded, headers=None):
    headers = [[key, base64.b64encode(value).decode()] for key, value in (headers or [])]
    records[name] = {"payload": base64.b64encode(encoded).decode(), "headers": headers}


def context(topic, field=MessageField.VALUE):
    return SerializationContext(topic, field, [])


ORDER_V1 = {
    "type": "record", "name": "Order", "namespace": "shop",
    "fields": [
        {"name": "number", "type": "int"},
        {"name": "customer", "type": "string"},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["OPEN", "SENT"]}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
        {"name": "placed_at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "lines", "type": {"type": "array", "items": {
            "type": "record", "name": "Line", "fields": [
                {"name": "article", "type": "string"}, {"name": "weight", "type": "double"}, {"name": "parts", "type": ["null", "Line"]},
            ]}}},
        {"name": "labels", "type": {"type": "map", "values": "string"}},
        {"name": "digest", "type": {"type": "fixed", "name": "Digest", "size": 4}},
        {"name": "ratio", "type": "float"},
        {"name": "gift", "type": "boolean"},
    ],
}
ORDER = {
    "number": -17, "customer": "Ännchen", "state": "SENT", "price": decimal.Decimal("-12.50"),
    "placed_at": datetime.datetime(2026, 1, 31, 9, 0, tzinfo=datetime.timezone.utc), "note": None,
    "lines": [
        {"article": "tea", "weight": 0.25, "parts": {"article": "bag", "weight": 0.01, "parts": None}},
        {"article": "cup", "weight": 0.5, "parts": None},
    ],
    "labels": {"a": "1", "b": "2"}, "digest": b"\x00\x01\xfe\xff", "ratio": 0.5, "gift": True,
}
# Compared with V1: `channel` is new with a default, `customer` is renamed, `number` is wider, most others are removed.
ORDER_V2 = {
    "type": "record", "name": "Order", "namespace": "shop",
    "fields": [
        {"name": "number", "type": "long"},
        {"name": "buyer", "type": "string", "aliases": ["customer"]},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "channel", "type": "string", "default": "shop"},
    ],
}


def avro(schema, **options):
    return AvroSerializer(registry, json.dumps(schema) if isinstance(schema, dict) else schema, conf=options)


keep("avro", avro(ORDER_V1)(ORDER, context("orders")))
keep("avro_v2", avro(ORDER_V2)(
    {"number": 2**40, "buyer": "Bo", "note": "quick", "channel": "web"}, context("evolved")))
in_header = context("headers")
keep("avro_header", avro(ORDER_V1, **{"schema.id.serializer": header_schema_id_serializer})(ORDER, in_header), in_header.headers)
keep("avro_key", avro('"long"')(17, context("orders", MessageField.KEY)))

registry.register_schema("customer", Schema(json.dumps({
    "type": "record", "name": "Customer", "namespace": "crm", "fields": [{"name": "name", "type": "string"}]}), "AVRO"))
referring = Schema(json.dumps({
    "type": "record", "name": "Visit", "namespace": "shop",
    "fields": [{"name": "who", "type": "crm.Customer"}, {"name": "by", "type": ["null", "crm.Customer"]}]}),
    "AVRO", [SchemaReference("crm.Customer", "customer", 1)])
keep("avro_reference", AvroSerializer(registry, referring)({"who": {"name": "Cy"}, "by": None}, context("visits")))

keep("json", JSONSerializer(json.dumps({
    "title": "Order", "type": "object", "properties": {"number": {"type": "integer"}}}), registry)({"number": 17}, context("json")))

# The descriptors are built here, so that no Protobuf compiler is needed.
file = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
kinds = descriptor_pb2.FieldDescriptorProto
order = file.message_type.add(name="Order")
order.field.add(name="number", number=1, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
order.field.add(name="customer", number=2, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
other = file.message_type.add(name="Other")
inner = other.nested_type.add(name="Inner")
inner.field.add(name="text", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
pool = descriptor_pool.DescriptorPool()
pool.Add(file)


def message(name, **fields):
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))(**fields)


def protobuf(value, **options):
    return ProtobufSerializer(type(value), registry, {"use.deprecated.format": False, **options})


value = message("shop.Order", number=17, customer="Di")
keep("protobuf", protobuf(value)(value, context("protobuf")))
in_header = context("protobuf-headers")
keep("protobuf_header", protobuf(value, **{"schema.id.serializer": header_schema_id_serializer})(value, in_header), in_header.headers)
value = message("shop.Other.Inner", text="deep")
keep("protobuf_nested", protobuf(value)(value, context("protobuf")))

schemas = []
for subject in registry.get_subjects():
    for version in registry.get_versions(subject):
        found = registry.get_version(subject, version)
        references = [{"name": r.name, "subject": r.subject, "version": r.version} for r in found.schema.references or []]
        kind, text = found.schema.schema_type, found.schema.schema_str
        # The mock registry returns a descriptor; a real one returns the text of the file.
        if kind == "PROTOBUF":
            text = ('syntax = "proto3"; package shop; message Order { int64 number = 1; string customer = 2; } '
                    'message Other { message Inner { string text = 1; } }')
        schemas.append({
            "id": found.schema_id, "guid": found.guid, "subject": subject, "version": version,
            "schema": text, "schemaType": kind, "references": references,
        })
json.dump({"schemas": schemas, "records": records}, sys.stdout, indent=1)
