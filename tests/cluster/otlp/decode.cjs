// Prints the spans of the bodies in the files that are named, one JSON object a line: decoded by the messages that OpenTelemetry
// generates from its own protocol files.
const fs = require("fs");
const path = require("path");
const folder = path.join(__dirname, "node_modules", "@opentelemetry", "otlp-transformer");
const root = require(path.join(folder, "build", "src", "generated", "root.js"));
const Request = root.opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest;

function plain(value) {
  if (value.arrayValue) return value.arrayValue.values.map(plain);
  return value.stringValue ?? value.boolValue ?? (value.intValue !== undefined ? Number(value.intValue) : value.doubleValue);
}
const attributes = (list) => Object.fromEntries((list ?? []).map((a) => [a.key, plain(a.value)]));
const hex = (bytes) => Buffer.from(bytes ?? "", "base64").toString("hex");

for (const file of process.argv.slice(2)) {
  const request = Request.toObject(Request.decode(fs.readFileSync(file)), { longs: String, bytes: String });
  for (const of of request.resourceSpans) {
    for (const scope of of.scopeSpans) {
      for (const s of scope.spans) {
        console.log(JSON.stringify({
          trace: hex(s.traceId), id: hex(s.spanId), parent: hex(s.parentSpanId), name: s.name, kind: s.kind, status: s.status ?? null,
          start: s.startTimeUnixNano, end: s.endTimeUnixNano, attributes: attributes(s.attributes),
          resource: attributes(of.resource.attributes), scope: scope.scope.name,
        }));
      }
    }
  }
}
