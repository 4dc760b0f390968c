// Prints the JSON schema of each of 50 zod types, by its source.
import { z } from "zod";

const sources = [
  "z.string()", "z.string().min(2).max(5)", "z.string().regex(/^[a-z]+$/)", "z.email()", "z.uuid()", "z.url()",
  "z.iso.datetime()", "z.iso.date()", "z.iso.time()", "z.iso.duration()", "z.ipv4()", "z.ipv6()", "z.base64()",
  "z.cuid2()", "z.ulid()", "z.nanoid()", "z.jwt()", "z.e164()", "z.number()", "z.number().int()", "z.int32()",
  "z.uint32()", "z.number().gt(0).lte(0.5)", "z.number().multipleOf(0.5)", "z.float64()", "z.boolean()", "z.null()",
  "z.any()", "z.unknown()", "z.never()", "z.literal('a')", "z.literal([1, 'b', null])", "z.enum(['a', 'b'])",
  "z.array(z.string())", "z.array(z.int()).min(1).max(3)", "z.tuple([z.string(), z.number()])",
  "z.tuple([z.string()], z.number())", "z.object({ a: z.string(), b: z.number().optional() })",
  "z.strictObject({ a: z.string() })", "z.looseObject({ a: z.string() })",
  "z.object({ a: z.string() }).catchall(z.number())", "z.record(z.string(), z.number())",
  "z.record(z.enum(['a', 'b']), z.boolean())", "z.union([z.string(), z.number()])",
  "z.discriminatedUnion('k', [z.object({ k: z.literal('a') }), z.object({ k: z.literal('b'), n: z.int() })])",
  "z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() }))", "z.string().nullable()",
  "z.string().default('x')", "z.object({ get next() { return node.optional(); }, value: z.int() })",
  "z.object({ a: z.object({ b: z.array(z.object({ c: z.string().describe('c') })) }) })",
];
const node = z.object({ value: z.int(), get children() { return z.array(node); } });
const types = sources.map((source) => [source, new Function("z", "node", `return ${source}`)(z, node)]);
console.log(JSON.stringify(types.map(([source, type]) => [source, z.toJSONSchema(type)])));
