// JSON schemas in words.

/** Return a schema without the choice of null, which every optional field has. */
export function withoutNull(schema) {
  const choices = schema?.anyOf?.filter((choice) => choice.type !== "null");
  return choices?.length === 1 ? choices[0] : schema;
}

/** Return the type of a schema and its exact bounds, such as `integer, 1 to 128`. */
export function typeOf(nullable) {
  const schema = withoutNull(nullable);
  if (!schema) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.map(withoutNull).filter((choice) => choice.type !== "null").map(typeOf).join("; or ");
  const kind = Array.isArray(schema.type) ? schema.type.join(" or ") : schema.type ?? "any";
  const name = schema.type === "array" ? `list of (${typeOf(schema.items)})` : kind;
  const bounds = [
    within(schema.minimum, schema.maximum, ""),
    schema.exclusiveMinimum === undefined ? "" : `above ${schema.exclusiveMinimum}`,
    schema.exclusiveMaximum === undefined ? "" : `below ${schema.exclusiveMaximum}`,
    within(schema.minLength, schema.maxLength, " characters"),
    within(schema.minItems, schema.maxItems, " items"),
    schema.pattern ? `matching ${schema.pattern}` : "",
  ];
  return [name, ...bounds.filter(Boolean)].join(", ");
}

function within(low, high, unit) {
  if (low !== undefined && high !== undefined) return `${low} to ${high}${unit}`;
  if (low !== undefined) return `at least ${low}${low === 1 ? unit.replace(/s$/, "") : unit}`;
  return high === undefined ? "" : `at most ${high}${unit}`;
}
