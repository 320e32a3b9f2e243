// A policy as one text, like mq(lifetime=2): its name and parameters, as shadows are named.

export function parse(text) {
  const match = /^\s*([A-Za-z0-9_.-]+)\s*(?:\((.*)\))?\s*$/.exec(text);
  if (!match) throw new Error(`"${text}" is no policy: it looks like lru or mq(lifetime=2)`);
  const params = {};
  for (const part of (match[2] ?? "").split(",").filter((each) => each.trim())) {
    const [name, value, more] = part.split("=").map((each) => each.trim());
    if (!name || value === undefined || value === "" || more !== undefined) throw new Error(`"${part.trim()}" is no parameter: it looks like lifetime=2`);
    params[name] = value === "true" ? true : value === "false" ? false : value === "null" ? null : Number.isNaN(Number(value)) ? value : Number(value);
  }
  return { name: match[1], params };
}

export function render({ name, params }) {
  const parts = Object.entries(params ?? {}).map(([key, value]) => `${key}=${value}`);
  return parts.length ? `${name}(${parts.join(",")})` : name;
}
