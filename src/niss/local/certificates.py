"""Keys and certificates for a federation on one machine: an authority of its own, and a key for each node.

They are made for one `niss up` and thrown away with it. For several machines, use the authority you trust.

TLS proves the SuperLink and the tracker to those who connect to them. A SuperNode proves itself to the SuperLink with
its own key, and a client to the others with its NISS identity (`niss.protocol.keyfile`), which is not made here.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from niss.files import write_new

_DAYS = 30
_PEM = serialization.Encoding.PEM
_UNENCRYPTED = serialization.NoEncryption()


@dataclass(frozen=True)
class Certificates:
    """Where the TLS files of this machine are, all in PEM.

    authority    certificate of the authority, which everyone is told to trust
    certificate  this machine's own, for 127.0.0.1 and localhost, signed by the authority
    key          its private key, mode 0600
    """

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, folder: Path) -> Self:
        """Where `make_certificates` puts them."""
        return cls(folder / "ca.crt", folder / "tls.pem", folder / "tls.key")


def make_certificates(folder: Path, now: datetime.datetime) -> Certificates:
    """Make an authority, and a certificate for 127.0.0.1 and localhost that it signed.

    Both are valid for 30 days from `now`. The authority's private key is never written: nobody can sign with it
    once this returns. Raises FileExistsError where `folder` already has a TLS key.
    """
    authority_key = ec.generate_private_key(ec.SECP256R1())
    server_key = ec.generate_private_key(ec.SECP256R1())
    issuer, subject = _name("niss up: authority of one run"), _name("localhost")
    authority = (
        _certificate(issuer, issuer, authority_key, now, signs_certificates=True)
        .sign(authority_key, hashes.SHA256())
        .public_bytes(_PEM)
    )
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        _certificate(subject, issuer, server_key, now, signs_certificates=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(issuer_id, critical=False)
        .sign(authority_key, hashes.SHA256())
        .public_bytes(_PEM)
    )
    paths = Certificates.in_folder(folder)
    paths.authority.write_bytes(authority)
    paths.certificate.write_bytes(certificate)
    pem = serialization.PrivateFormat.TraditionalOpenSSL
    write_new(paths.key, server_key.private_bytes(_PEM, pem, _UNENCRYPTED))
    return paths


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Make the key pair by which a SuperNode authenticates itself: ECDSA P-384 in OpenSSH format, as Flower wants it.

    Returns the paths of the private key (`name`, mode 0600) and of the public one (`name.pub`).
    """
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    write_new(private, key.private_bytes(_PEM, serialization.PrivateFormat.OpenSSH, _UNENCRYPTED))
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return private, public


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    *,
    signs_certificates: bool,
) -> x509.CertificateBuilder:
    """What the two certificates have in common; it starts an hour early for clocks that are slow."""
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(ca=signs_certificates, path_length=0 if signs_certificates else None)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )
