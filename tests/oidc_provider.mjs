// An issuer of OpenID Connect for tests: npm's oidc-provider. Who signs in as TENANT.ROLE is that.
// SIGHUP rotates its keys: a new one signs, and the one before it verifies.
import http from "node:http";
import { exportJWK, generateKeyPair } from "jose";
import { Provider } from "oidc-provider";

const late = 1000 * Number(process.env.SECONDS_LATE ?? 0);
const now = Date.now;
Date.now = () => now() - late;

async function key(kid) {
  const { privateKey } = await generateKeyPair("RS256", { extractable: true });
  return { ...(await exportJWK(privateKey)), kid, use: "sig", alg: "RS256" };
}

let keys = [await key("k1")];
const server = http.createServer((request, response) => handle(request, response));
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const issuer = `http://127.0.0.1:${server.address().port}`;
const machine = (client_id) => ({
  client_id, client_secret: "s3cret", grant_types: ["client_credentials"], redirect_uris: [], response_types: [],
});
const clients = [
  ...["research.admin", "research.client", "research.viewer", "rival.client"].map(machine),
  {
    client_id: "moorage", token_endpoint_auth_method: "none", application_type: "native",
    grant_types: ["urn:ietf:params:oauth:grant-type:device_code", "refresh_token", "authorization_code"],
    redirect_uris: ["http://localhost/console/sign-in/callback"], response_types: ["code"],
    post_logout_redirect_uris: ["http://localhost/console/sign-in/callback"],
  },
];
const resource = {
  scope: "lease", audience: process.env.AUDIENCE ?? "moorage", accessTokenFormat: "jwt", accessTokenTTL: Number(process.env.TTL ?? 300),
  jwt: { sign: { alg: "RS256" } },
};
const settings = () => ({
  clients,
  jwks: { keys },
  cookies: { keys: ["k"] },
  ttl: { DeviceCode: Number(process.env.DEVICE_CODE_TTL ?? 600) },
  features: {
    clientCredentials: { enabled: true },
    deviceFlow: { enabled: true },
    rpInitiatedLogout: { enabled: process.env.LOGOUT !== "off" },
    resourceIndicators: {
      enabled: true, defaultResource: () => "urn:moorage", useGrantedResource: () => true,
      getResourceServerInfo: () => resource,
    },
  },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id }) }),
  extraTokenClaims: (_, token) => {
    const [moorage_tenant, moorage_role] = (token.accountId ?? token.clientId).split(".");
    return { moorage_tenant, moorage_role };
  },
});
function provide() {
  const provider = new Provider(issuer, settings());
  provider.use(async (context, next) => {
    await next();
    // Clients that poll for a device code would wait for 5 seconds without it (RFC 8628, 3.2).
    if (context.oidc?.route === "device_authorization") context.body.interval = 1;
  });
  return provider.callback();
}
let handle = provide();
let made = 1;
process.on("SIGHUP", async () => {
  keys = [await key(`k${++made}`), keys[0]];
  handle = provide();
  console.log(JSON.stringify({ signs: keys[0].kid }));
});
console.log(JSON.stringify({ issuer }));
