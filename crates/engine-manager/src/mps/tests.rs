use std::os::unix::fs::PermissionsExt as _;

use tempfile::TempDir;

use super::*;

/// A stand-in for NVIDIA's program, and everything that it writes.
struct Fake {
    control: Control,
    directory: TempDir,
}

impl Fake {
    fn new(mode: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("control");
        let body = include_str!("fake.sh").replacen(
            "pipe=",
            &format!(
                "FAKE_MODE={mode} FAKE_LOG={}\npipe=",
                directory.path().join("log").display()
            ),
            1,
        );
        std::fs::write(&script, body).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).unwrap();
        let control = Control {
            program: script.into(),
            pipe_variable: None,
            default_pipe: directory.path().join("default"),
            parent: directory.path().to_owned(),
            start_deadline: Duration::from_millis(800),
        };
        Fake { control, directory }
    }

    /// What the program was asked, in order.
    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// A daemon of someone else in the default directory.
    fn someone_elses(&self) {
        std::fs::create_dir(&self.control.default_pipe).unwrap();
        std::fs::write(self.control.default_pipe.join("control"), "1").unwrap();
    }
}

#[tokio::test]
async fn a_daemon_is_started_in_a_directory_of_its_own_and_leaves_nothing() {
    let fake = Fake::new("");
    let daemon = fake.control.find_or_start().await.unwrap();
    assert!(daemon.started_here());
    let directory = daemon.pipe_directory().to_owned();
    assert!(directory.join("control").exists() && directory.starts_with(fake.directory.path()));
    let log = fake.log();
    assert!(log.contains("start threads=unset devices=unset\n"), "{log}");
    assert!(
        log.contains("start_server -uid") && log.contains("get_server_status 77"),
        "{log}"
    );

    quit_with(&fake.control, &directory).await.unwrap();
    assert!(!directory.exists());
    assert!(fake.log().contains("quit -t 8"), "{}", fake.log());
    // Told once more (the keeper of a process that ended well), there is nothing to do.
    quit_with(&fake.control, &directory).await.unwrap();
}

#[tokio::test]
async fn a_daemon_that_answers_is_used_and_is_nobody_elses() {
    for named in [false, true] {
        let mut fake = Fake::new("");
        fake.someone_elses();
        if named {
            fake.control.pipe_variable = Some(std::mem::replace(
                &mut fake.control.default_pipe,
                "/nowhere".into(),
            ));
        }
        for daemon in [fake.control.find_or_start().await, fake.control.find().await] {
            let daemon = daemon.unwrap();
            assert!(!daemon.started_here());
            assert_eq!(daemon.pipe_directory(), fake.directory.path().join("default"));
        }
        assert!(!fake.log().contains("start"), "{}", fake.log());
    }
}

#[tokio::test]
async fn what_keeps_a_daemon_from_working_is_said_with_what_to_do() {
    let check = async |fake: Fake, required: bool, says: &[&str]| {
        let outcome = match required {
            true => fake.control.find_or_start().await,
            false => fake.control.find().await,
        };
        let error = outcome.unwrap_err().to_string();
        for part in says {
            assert!(error.contains(part), "{error}: no {part}");
        }
        let entries = std::fs::read_dir(fake.directory.path()).unwrap();
        let left: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with("laneway-mps"))
            .collect();
        assert!(left.is_empty(), "{left:?} is left behind {error}");
    };
    let mut absent = Fake::new("");
    absent.control.program = "no-such-mps-control".into();
    check(absent, true, &["run no-such-mps-control", "mode: disabled"]).await;
    check(
        Fake::new(""),
        false,
        &["is to run already", "Cannot find", "CUDA_MPS_PIPE_DIRECTORY"],
    )
    .await;
    check(
        Fake::new("refuses"),
        true,
        &["no MPS daemon answers", "exit status: 1"],
    )
    .await;
    check(
        Fake::new("dead"),
        true,
        &["no MPS daemon answers", "Cannot find", "cannot open /dev/nvidia0"],
    )
    .await;
    check(Fake::new("fault"), true, &["MPS server 77", "FAULT"]).await;
    let mut deep = Fake::new("");
    deep.control.parent = deep.directory.path().join("d".repeat(80));
    std::fs::create_dir(&deep.control.parent).unwrap();
    check(deep, true, &["bytes long", "TMPDIR"]).await;
    let mut nowhere = Fake::new("");
    nowhere.control.parent = "/no/such/directory".into();
    check(nowhere, true, &["make a directory", "/no/such/directory"]).await;
}

#[tokio::test]
async fn workers_that_are_no_clients_are_found_and_a_client_is_ended_before_it_is_killed() {
    let fake = Fake::new("");
    let daemon = fake.control.find_or_start().await.unwrap();
    std::fs::write(daemon.pipe_directory().join("clients"), "11\n12\n").unwrap();
    assert_eq!(daemon.clients().await.unwrap(), [11, 12].into());
    daemon.check_clients(&[11, 12]).await.unwrap();
    // As many as there should be, numbered by another name space.
    daemon.check_clients(&[3, 4]).await.unwrap();
    let error = daemon.check_clients(&[11, 12, 13]).await.unwrap_err().to_string();
    assert!(error.contains("2 client(s)") && error.contains("[13]"), "{error}");

    daemon.terminate_client(12).await.unwrap();
    daemon.terminate_client(99).await.unwrap();
    let log = fake.log();
    assert!(
        log.contains("terminate_client 77 12\n") && !log.contains("77 99"),
        "{log}"
    );
    quit_with(&fake.control, daemon.pipe_directory()).await.unwrap();
}
