"""https on both sides of the router, with a certificate made for the test."""

import asyncio
import datetime
import ipaddress
import ssl

import aiohttp
import pytest

from kvberth.router import RouterConfig, create_app
from kvberth.router.config import Mode

from .fakes import D_ANSWER, hangs, streams

pytest.importorskip("cryptography", reason="the certificate is made with cryptography")
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

pytestmark = pytest.mark.anyio

PROMPT = {"model": "m", "prompt": "hi"}
EVENT = b"data: {}\n\n"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvberth test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    certfile.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    keyfile.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(certfile), str(keyfile)


@pytest.mark.parametrize("mode", Mode)
async def test_engines_behind_https(site, certificate, mode):
    """Their certificates are checked against the file that was given."""
    prefill, decode = await site.prefill(certificate=certificate), await site.decode(certificate=certificate)
    client = await site.router([prefill], [decode], mode=mode, engine_ca_file=certificate[0])
    async with client.post(PROMPT) as response:
        assert (response.status, await response.json()) == (200, D_ANSWER)


async def test_engines_that_nobody_vouches_for(site, certificate):
    """They are not spoken to, unless that was asked for."""
    decode = await site.decode(certificate=certificate)
    client = await site.router([], [decode], wait_for="unavailable")
    assert "CERTIFICATE_VERIFY_FAILED" in (await client.health())["decode"][0]["problem"]
    client = await site.router([], [decode], wait_for="degraded", engine_insecure=True)
    async with client.post(PROMPT) as response:
        assert response.status == 200


async def test_serving_https(site, certificate):
    """Streams and clients that go are what they are without."""
    certfile, keyfile = certificate
    site.trusted = ssl.create_default_context(cafile=certfile)
    decode = await site.decode(streams(EVENT, then=hangs))
    client = await site.router([await site.prefill()], [decode], ssl_certfile=certfile, ssl_keyfile=keyfile)
    assert client.url.startswith("https://")
    async with asyncio.timeout(5):
        async with client.post(PROMPT | {"stream": True}) as response:
            assert await response.content.readany() == EVENT
        await decode.aborted.wait()
    async with aiohttp.ClientSession() as plain:
        with pytest.raises(aiohttp.ClientError):
            await plain.get(client.url.replace("https", "http") + "/health")


def test_an_authority_that_cannot_be_read():
    """The router does not start."""
    with pytest.raises(ssl.SSLError):
        create_app(RouterConfig(prefill=(), decode=("https://d",), engine_ca_file=__file__))


async def test_engines_that_come_later_are_behind_https_too(site, certificate, tmp_path):
    """The authority is that of all engines: of those in the file, and of those that the admin API adds."""
    prefill, decode = await site.prefill(certificate=certificate), await site.decode(certificate=certificate)
    (tmp_path / "engines").write_text(decode.url)
    client = await site.router(
        engines_file=str(tmp_path / "engines"), engine_ca_file=certificate[0], wait_for="degraded"
    )
    async with client.admin("POST", "/kvberth/engines", {"url": prefill.url}) as response:
        assert response.status == 201
    await client.until_healthy("ok")
    async with client.post(PROMPT) as response:
        assert (response.status, response.headers["x-kvberth-path"]) == (200, "push")
