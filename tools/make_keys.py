"""Make the keys of a deployment: publisher, private CA with a server certificate, devices and their site's secret.

Nothing existing is replaced: run it again with other `--device` names to add devices. Private files have mode 0600.

    keys/publisher.key publisher.pub     signs packages / travels to every device as --trust
    keys/ca.key ca.pem                   private CA (keep ca.key offline) / travels to every device as --ca
    keys/server.key server.pem           for server-run
    keys/roster/SITE/DEVICE.pub          who may join, and for which site: server-run --roster keys/roster
    keys/sites/SITE.secret               root of the site's class permutation; never goes to the server
    keys/devices/DEVICE/                 what to copy to that device: device.key site.secret ca.pem publisher.pub
                        tls.pem tls.key  with --certificate DEVICE: for edge-run --certificate, where server-run has
                                         --client-ca keys/ca.pem; also for a device that made its own device.key
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import re
import secrets
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from contract import signature
from contract.console import ArgumentParser, run_command, say
from contract.errors import UsageError
from contract.output import open_output

CA_DAYS = 3650
CERTIFICATE_DAYS = 825
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def main() -> int:
    arguments = parse(sys.argv[1:])
    root = open_output(arguments.output)
    make_publisher(root)
    make_ca(root)
    make_server(root, arguments.host)
    for device in arguments.device:
        make_device(root, arguments.site, device)
    for device in arguments.certificate:
        make_certificate(root, device)
    say(f"keys of {len(arguments.device)} device(s) of site {arguments.site!r} are in {root}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="tools/make_keys", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the keys, made when missing")
    parser.add_argument("--host", action="append", help="name or address of the server (repeatable; default localhost)")
    parser.add_argument("--site", default="site", help="site of the devices (default %(default)s)")
    parser.add_argument("--device", action="append", default=[], help="name of a device (repeatable)")
    parser.add_argument(
        "--certificate", action="append", default=[], metavar="DEVICE", help="a TLS certificate for it (repeatable)"
    )
    arguments = parser.parse_args(argv)
    arguments.host = arguments.host or ["localhost", "127.0.0.1", "::1"]
    for name in [arguments.site, *arguments.device, *arguments.certificate]:
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot name a site or device", "use letters, digits, '.', '_' and '-', at most 64"
            )
    return arguments


def make_publisher(root: Path) -> None:
    if not (root / "publisher.key").exists():
        root.mkdir(parents=True, exist_ok=True)
        key = signature.generate()
        signature.save_private(root / "publisher.key", key)
        signature.save_public(root / "publisher.pub", key.public_key())


def make_device(root: Path, site: str, device: str) -> None:
    folder = root / "devices" / device
    if folder.exists():
        raise UsageError(
            f"device {device!r} has keys already in {folder}", "choose another name, or delete that folder"
        )
    site_secret = root / "sites" / f"{site}.secret"
    if not site_secret.exists():
        write_private(site_secret, secrets.token_bytes(32))
    folder.mkdir(parents=True)
    roster = root / "roster" / site
    roster.mkdir(parents=True, exist_ok=True)
    key = signature.generate()
    signature.save_private(folder / "device.key", key)
    signature.save_public(roster / f"{device}.pub", key.public_key())
    write_private(folder / "site.secret", site_secret.read_bytes())
    for name in ("ca.pem", "publisher.pub"):
        (folder / name).write_bytes((root / name).read_bytes())


def make_ca(root: Path) -> None:
    if (root / "ca.key").exists():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Cutlayer private CA")])
    certificate = (
        certificate_builder(subject, subject, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_key(root / "ca.key", key)
    (root / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def make_server(root: Path, hosts: list[str]) -> None:
    if (root / "server.key").exists():
        return
    names = x509.SubjectAlternativeName([general_name(host) for host in hosts])
    issue(root, root / "server", hosts[0], ExtendedKeyUsageOID.SERVER_AUTH, names)


def make_certificate(root: Path, device: str) -> None:
    stem = root / "devices" / device / "tls"
    if stem.with_suffix(".key").exists():
        raise UsageError(
            f"device {device!r} has a certificate already: {stem}.pem", "delete it and its key to make another"
        )
    issue(root, stem, device, ExtendedKeyUsageOID.CLIENT_AUTH, None)


def issue(
    root: Path, stem: Path, name: str, usage: x509.ObjectIdentifier, names: x509.SubjectAlternativeName | None
) -> None:
    """A certificate by the private CA in STEM.pem, and its key in STEM.key.

    Python 3.13 verifies strictly: without both key identifiers and key usage a certificate is refused.
    """
    ca = x509.load_pem_x509_certificate((root / "ca.pem").read_bytes())
    ca_key = serialization.load_pem_private_key((root / "ca.key").read_bytes(), password=None)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{root / 'ca.key'} is not an elliptic-curve key", "delete ca.key and ca.pem to make a new CA")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    builder = (
        certificate_builder(subject, ca.subject, key.public_key(), CERTIFICATE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    certificate = builder.sign(ca_key, hashes.SHA256())
    write_key(stem.with_suffix(".key"), key)
    stem.with_suffix(".pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def certificate_builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # devices without a clock chip may lag
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    write_private(path, key.private_bytes(encoding, form, serialization.NoEncryption()))


def write_private(path: Path, data: bytes) -> None:
    """Create the file with mode 0600 from the first instant; an existing one is never replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


if __name__ == "__main__":
    sys.exit(run_command(main))
