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
            role: authority.issue("role", &["laneway.internal"], Valid::Now),
            public: authority.issue("public", &["127.0.0.1"], Valid::Now),
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
            (&[][..], "an API key"),
        ] {
            let refused = self.laneway(&say, more)?;
            let said = String::from_utf8(refused.stderr)?;
            anyhow::ensure!(
                !refused.status.success() && said.contains(words),
                "{words}: {said}"
            );
        }
        let stranger = Command::new(binary("laneway")?)
            .args(say)
            .args(["--api-key", KEY])
            .output()?;
        let said = String::from_utf8(stranger.stderr)?;
        anyhow::ensure!(
            !stranger.status.success() && said.contains("UnknownIssuer"),
            "{said}"
        );
        let listed = self.laneway(&["voices", "--gateway", &url], &["--api-key", KEY])?;
        anyhow::ensure!(String::from_utf8(listed.stdout)?.contains("nano"));
        Ok(())
    }
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
        let refused = secrets.laneway(&["health", &role], &named)?;
        anyhow::ensure!(
            !refused.status.success(),
            "{role} let somebody in without a certificate"
        );
        let plain = Command::new(binary("laneway")?)
            .args(["health", &role.replace("https", "http")])
            .output()?;
        anyhow::ensure!(!plain.status.success(), "{role} speaks without TLS");
    }
    Ok(())
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

#[test]
fn a_certificate_that_cannot_be_used_starts_nothing() -> anyhow::Result<()> {
    let secrets = Secrets::new()?;
    let config = Deployment::new(Placement::Lane).write()?;
    let internal = secrets.internal();
    for (name, mut arguments) in [
        ("laneway-engine-manager", vec!["--config", config.path()]),
        ("laneway-worker", vec!["--rank", "0"]),
        ("laneway-gateway", vec![]),
        ("laneway", vec!["up", "--config", config.path()]),
    ] {
        for (flags, words) in [
            (&internal[..2], "--internal-tls-key"),
            (
                &["--internal-tls-cert".to_owned(), "/nowhere".to_owned()][..],
                "--internal-tls-key",
            ),
        ] {
            arguments.extend(flags.iter().map(String::as_str));
            let output = Command::new(binary(name)?).args(&arguments).output()?;
            let said = String::from_utf8(output.stderr)?;
            anyhow::ensure!(output.status.code() == Some(2), "{name}: {said}");
            anyhow::ensure!(said.contains(words), "{name}: {said}");
            arguments.truncate(arguments.len() - flags.len());
        }
    }
    Ok(())
}
