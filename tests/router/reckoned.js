// What the page's model makes of requests that are known.
async () => {
  const model = await import("/kvberth/page/model.js");
  const request = (id, status, events = [], age = 1) =>
    model.request({
      request_id: id,
      endpoint: "/v1/completions",
      arrived_at: 0,
      age_seconds: age,
      mode: "push",
      path: "push",
      status,
      phases: [],
      events: status === null ? events : [...events, { at_seconds: 1, what: "ended", facts: { status } }],
    });
  const sent = { at_seconds: 0, what: "decode_sent", facts: { engine: "http://d" } };
  const failed = { at_seconds: 0.5, what: "leg_failed", facts: { leg: "decode", kind: "unreachable", detail: "gone" } };
  const ended = (status, error) => [{ at_seconds: 1, what: "ended", facts: { status, error, message: "" } }];
  const first = { at_seconds: 0.1, what: "first_token", facts: {} };
  const all = [
    request("a", 200),
    request("b", 200, [sent, failed]),
    request("c", 502, ended(502, "decode_failed")),
    request("d", 200, ended(200, "decode_failed")),
    request("e", 429, ended(429, "too_many_requests")),
    request("f", 400),
    request("g", 499),
    request("h", null),
  ];
  const flying = [request("old", null, [], 11), request("decodes", null, [first], 11), request("young", null, [], 9)];
  model.markStuck(flying, all);
  const twenty = [...Array(20).keys()].map((i) => 20 - i);
  return {
    percentiles: [
      model.percentile([], 0.5),
      model.percentile([3], 0.95),
      model.percentile(twenty, 0.5),
      model.percentile(twenty, 0.95),
    ],
    outcomes: all.map((read) => read.outcome),
    groups: model
      .failureGroups(all)
      .map((group) => [group.isSeen, group.reason, group.count])
      .sort((x, y) => y[0] - x[0] || (x[1] < y[1] ? -1 : 1)),
    stuck: flying.filter((read) => read.isStuck).map((read) => read.id),
  };
};
