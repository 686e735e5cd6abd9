//! The real binaries with mutual TLS between the roles, and TLS and API keys in front.

use std::path::Path;
use std::process::{Command, Output};

use anyhow::Context as _;
use laneway_integration_tests::PATIENCE;
use laneway_integration_tests::deployment::{Deployment, Placement};
use laneway_integration_tests::process::{Process, binary};
use laneway_tls::Identity;
use laneway_tls::testing::{Authority, Valid};

const KEY: &str = "alice-0123456789abc";

/// Names of the certificates.
const PUBLIC: &[&str] = &["127.0.0.1"];
const ROLE: &[&str] = &["laneway.internal"];

/// Certificates and keys of a deployment. All roles have one name, whatever host they are on.
struct Secrets {
    authority: Authority,
    role: Identity,
    public: Identity,
    keys: tempfile::NamedTempFile,
}

impl Secrets {
    fn new() -> anyhow::Result<Self> {
        let authority = Authority::new();
        let keys = tempfile::NamedTempFile::new()?;
        std::fs::write(keys.path(), format!("alice {KEY}\n"))?;
        Ok(Secrets {
            role: authority.issue("role", ROLE, Valid::Now),
            public: authority.issue("public", PUBLIC, Valid::Now),
            authority,
            keys,
        })
    }

    /// What every role is started with.
    fn internal(&self) -> Vec<String> {
        let flags = [
            ("--internal-tls-cert", text(&self.role.certificate)),
            ("--internal-tls-key", text(&self.role.key)),
            ("--internal-tls-ca", text(&self.authority.file())),
            ("--internal-tls-name", "laneway.internal".to_owned()),
        ];
        flags
            .into_iter()
            .flat_map(|(flag, value)| [flag.to_owned(), value])
            .collect()
    }

    /// What the gateway is started with beside it.
    fn public(&self) -> Vec<String> {
        let flags = [
            ("--tls-cert", text(&self.public.certificate)),
            ("--tls-key", text(&self.public.key)),
            ("--api-keys", text(self.keys.path())),
        ];
        flags
            .into_iter()
            .flat_map(|(flag, value)| [flag.to_owned(), value])
            .collect()
    }

    /// Run a command of `laneway` that calls a service.
    fn laneway(&self, arguments: &[&str], more: &[&str]) -> anyhow::Result<Output> {
        let authority = text(&self.authority.file());
        let mut command = Command::new(binary("laneway")?);
        command.args(arguments).args(["--ca", &authority]).args(more);
        Ok(command.output()?)
    }

    /// Wait until a service says, behind its TLS, that it serves.
    fn serving(&self, address: &str, more: &[&str]) -> anyhow::Result<()> {
        let deadline = std::time::Instant::now() + PATIENCE;
        loop {
            let output = self.laneway(&["health", address], more)?;
            if output.status.success() && output.stdout.starts_with(b"SERVING") {
                return Ok(());
            }
            anyhow::ensure!(std::time::Instant::now() < deadline, "{address}: {output:?}");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    /// Speak through the gateway, and be refused without the key, the certificates or both.
    fn check_gateway(&self, gateway: &str) -> anyhow::Result<()> {
        let url = format!("https://{gateway}");
        let directory = tempfile::tempdir()?;
        let file = text(&directory.path().join("out.wav"));
        let say = [
            "say",
            "Hello there.",
            "-o",
            &file,
            "--seed",
            "7",
            "--gateway",
            &url,
        ];
        let spoken = self.laneway(&say, &["--api-key", KEY])?;
        anyhow::ensure!(spoken.status.success(), "{spoken:?}");
        anyhow::ensure!(std::fs::metadata(&file)?.len() > 10_000, "some sound");
        for (more, words) in [
            (&["--api-key", "alice-0123456789abd"][..], "no such API key"),
            (&[], "give one that it knows with --api-key"),
            (&["--tls-name", "speech.example"], "dial a name that it is for"),
        ] {
            refused(&self.laneway(&say, more)?, 1, words)?;
        }
        let stranger = Command::new(binary("laneway")?).args(say).output()?;
        refused(
            &stranger,
            1,
            "UnknownIssuer; give the authority that signed it with --ca",
        )?;
        let plain = format!("http://{gateway}");
        let plain = ["voices", "--gateway", &plain];
        let open = Command::new(binary("laneway")?).args(plain).output()?;
        refused(&open, 1, "This address is served over TLS; write https://")?;
        refused(&self.laneway(&plain, &[])?, 2, "write https://, or leave it out")?;
        // With an authority an address needs no scheme, and a variable serves as well as a flag.
        let listed = Command::new(binary("laneway")?)
            .args(["voices", "--gateway", gateway])
            .env("LANEWAY_CA", self.authority.file())
            .env("LANEWAY_API_KEY", KEY)
            .output()?;
        anyhow::ensure!(
            String::from_utf8_lossy(&listed.stdout).contains("nano"),
            "{listed:?}"
        );
        Ok(())
    }

    /// Put what another authority signs in the place of all of it.
    fn replace(&self) -> anyhow::Result<()> {
        let next = Authority::new();
        next.reissue(&self.public, PUBLIC, Valid::Now);
        next.reissue(&self.role, ROLE, Valid::Now);
        let file = self.authority.file();
        let copy = file.with_extension("next");
        std::fs::copy(next.file(), &copy)?;
        Ok(std::fs::rename(copy, file)?)
    }
}

/// It ended so, and said these words.
fn refused(output: &Output, code: i32, words: &str) -> anyhow::Result<()> {
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(
        output.status.code() == Some(code) && said.contains(words),
        "not {code} for \"{words}\" but {}: {said}",
        output.status
    );
    Ok(())
}

fn text(path: &Path) -> String {
    path.to_str()
        .expect("temporary files have plain names")
        .to_owned()
}

fn start(name: &str, arguments: &[&str], flags: &[String]) -> anyhow::Result<Process> {
    let flags = flags.iter().map(String::as_str);
    let all: Vec<_> = arguments.iter().copied().chain(flags).collect();
    Process::start(name, &all)
}

#[test]
fn roles_on_their_own_speak_to_each_other_over_mutual_tls() -> anyhow::Result<()> {
    let secrets = Secrets::new()?;
    let internal = secrets.internal();
    let deployment = Deployment::new(Placement::Split);
    let config = deployment.write()?;
    let here = ["--listen", "127.0.0.1:0"];
    let manager = start(
        "laneway-engine-manager",
        &[&["--config", config.path()][..], &here].concat(),
        &internal,
    )?;
    let address = manager.address()?.to_string();
    let find = ["--engine-manager", &address];
    let mut workers = Vec::new();
    for rank in ["0", "1"] {
        let arguments = [&["--rank", rank][..], &here, &find].concat();
        workers.push(start("laneway-worker", &arguments, &internal)?);
    }
    let gateway = start(
        "laneway-gateway",
        &[&here[..], &find].concat(),
        &[internal, secrets.public()].concat(),
    )?;
    let public = gateway.address()?.to_string();
    secrets.serving(&format!("https://{public}"), &[])?;
    secrets.check_gateway(&public)?;

    // How a probe asks a role that lets nobody in without a certificate.
    let (certificate, key) = (text(&secrets.role.certificate), text(&secrets.role.key));
    let named = ["--tls-name", "laneway.internal"];
    let shown = [&["--cert", &certificate, "--key", &key][..], &named].concat();
    for role in [manager.address()?, workers[0].address()?, workers[1].address()?] {
        let role = format!("https://{role}");
        secrets.serving(&role, &shown)?;
        let stranger = secrets.laneway(&["health", &role], &named)?;
        refused(
            &stranger,
            1,
            "it asks for a certificate; show one with --cert and --key",
        )?;
        let other = secrets.authority.issue("other", PUBLIC, Valid::Now);
        let (certificate, key) = (text(&other.certificate), text(&other.key));
        let other = [&["--cert", &certificate, "--key", &key][..], &named].concat();
        let stranger = secrets.laneway(&["health", &role], &other)?;
        refused(&stranger, 1, "other.pem is not for a name that is let in there")?;
        let plain = Command::new(binary("laneway")?)
            .args(["health", &role.replace("https", "http")])
            .output()?;
        refused(&plain, 1, "This address is served over TLS; write https://")?;
    }
    Ok(())
}

#[test]
fn certificates_are_replaced_without_a_restart() -> anyhow::Result<()> {
    let secrets = Secrets::new()?;
    let deployment = Deployment::new(Placement::Lane);
    let config = deployment.write()?;
    let here = ["--listen", "127.0.0.1:0"];
    let manager = start(
        "laneway-engine-manager",
        &[&["--config", config.path()][..], &here].concat(),
        &secrets.internal(),
    )?;
    let address = manager.address()?.to_string();
    let find = ["--engine-manager", &address];
    let arguments = [&["--rank", "0"][..], &here, &find].concat();
    let worker = start("laneway-worker", &arguments, &secrets.internal())?;
    let gateway = || {
        let flags = [secrets.internal(), secrets.public()].concat();
        start("laneway-gateway", &[&here[..], &find].concat(), &flags)
    };
    let first = gateway()?;
    let public = first.address()?.to_string();
    secrets.serving(&format!("https://{public}"), &[])?;

    let before = tempfile::NamedTempFile::new()?;
    std::fs::copy(secrets.authority.file(), before.path())?;
    secrets.replace()?;
    secrets.serving(&format!("https://{public}"), &[])?;
    secrets.check_gateway(&public)?;
    let old = text(before.path());
    let distrusts = Command::new(binary("laneway")?)
        .args(["health", &public, "--ca", &old])
        .output()?;
    refused(&distrusts, 1, "give the authority that signed it with --ca")?;

    // Who comes now is let in by those who were there, with certificates that they had not when they started.
    let (certificate, key) = (text(&secrets.role.certificate), text(&secrets.role.key));
    let shown = [
        "--cert",
        &certificate,
        "--key",
        &key,
        "--tls-name",
        "laneway.internal",
    ];
    for role in [manager.address()?, worker.address()?] {
        secrets.serving(&format!("https://{role}"), &shown)?;
    }
    let second = gateway()?;
    let public = second.address()?.to_string();
    secrets.serving(&format!("https://{public}"), &[])?;
    secrets.check_gateway(&public)
}

#[test]
fn one_command_starts_all_of_it_and_passes_the_certificates_on() -> anyhow::Result<()> {
    let secrets = Secrets::new()?;
    let config = Deployment::new(Placement::Split).write()?;
    let arguments = [
        "up",
        "--config",
        config.path(),
        "--listen",
        "127.0.0.1:0",
        "--log",
        "info",
    ];
    let up = start(
        "laneway",
        &arguments,
        &[secrets.internal(), secrets.public()].concat(),
    )?;
    let gateway = up.wait_for_line("the gateway's address", |line| {
        let (_, after) = line.split_once("\"gateway\":\"")?;
        Some(after.split_once('"')?.0.to_owned())
    })?;
    secrets.serving(&format!("https://{gateway}"), &[])?;
    secrets.check_gateway(&gateway)?;
    up.wait_for_line("where to speak", |line| {
        line.contains("serving on https://").then_some(())
    })
    .context("it says how it is reached")
}

/// What is started all the same, and refused later by whom it meets.
#[test]
fn a_certificate_that_will_be_refused_is_told_of_at_the_start() -> anyhow::Result<()> {
    let secrets = Secrets::new()?;
    let told = |name: &str, flags: Vec<String>, words: &str| -> anyhow::Result<()> {
        let process = start(name, &["--listen", "127.0.0.1:0"], &flags)?;
        process.wait_for_line(words, |line| {
            (line.contains("\"level\":\"WARN\"") && line.contains(words)).then_some(())
        })
    };
    let authority = &secrets.authority;
    authority.reissue(&secrets.public, PUBLIC, Valid::Expired);
    told(
        "laneway-gateway",
        secrets.public(),
        "expired on Feb  1 00:00:00 2001",
    )?;
    authority.reissue(&secrets.role, &["other.internal"], Valid::Now);
    let asked = "is not for \\\"laneway.internal\\\", which other roles ask for";
    told("laneway-gateway", secrets.internal(), asked)?;
    // Without a name for all of them, each is dialled by its host's.
    let unnamed = secrets.internal()[..6].to_vec();
    told(
        "laneway-worker",
        unnamed,
        "is not for \\\"127.0.0.1\\\", which other roles ask for",
    )
}

#[test]
fn a_certificate_that_cannot_be_used_starts_nothing() -> anyhow::Result<()> {
    let secrets = Secrets::new()?;
    let config = Deployment::new(Placement::Lane).write()?;
    let internal = secrets.internal();
    let mut nowhere = internal.clone();
    "/nowhere/role.pem".clone_into(&mut nowhere[1]);
    for (name, arguments) in [
        ("laneway-engine-manager", vec!["--config", config.path()]),
        ("laneway-worker", vec!["--rank", "0"]),
        ("laneway-gateway", vec![]),
        ("laneway", vec!["up", "--config", config.path()]),
    ] {
        for (flags, words) in [
            (&internal[..2], "--internal-tls-key = \"\": it is missing"),
            (
                &nowhere[..],
                "--internal-tls-cert = \"/nowhere/role.pem\": read /nowhere/role.pem: No such file",
            ),
        ] {
            let output = Command::new(binary(name)?)
                .args(&arguments)
                .args(flags)
                .output()?;
            refused(&output, 2, words).context(name)?;
        }
    }
    let in_vain = secrets.laneway(&["say", "Hello there.", "-o", "/nowhere/out.wav"], &[])?;
    refused(&in_vain, 2, "name one with --gateway, or leave it out")
}
