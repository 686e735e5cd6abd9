//! TLS between callers and the gateway, and between the roles: certificates from files, read again when they change.
//!
//! Owns: what the files say now. [`ServerTls`] is the side of a listener, [`ClientTls`] of who dials; [`InternalTls`] is
//! both at once, for roles that each prove to the other what they are. A connection keeps what it began with. A file
//! that cannot be used changes nothing: what was read last stays, and it is told and counted. A certificate that has
//! expired, will soon, or is not for the name that all roles ask for is used, and warned of.
//!
//! Must not know: what is served.

mod advice;
mod client;
mod files;
pub mod flags;
mod incoming;
mod named;
mod refusal;
mod reload;
mod server;
mod term;
#[cfg(feature = "testing")]
pub mod testing;

pub use client::{AddressError, ClientFiles, ClientTls, Dial};
pub use files::{Identity, TlsError};
pub use incoming::{Accepted, Incoming};
pub use reload::Watch;
pub use server::{Protocols, ServerFiles, ServerTls};

/// What a role has for the others: one certificate for both of its sides, and the authority that signed everybody's.
#[derive(Debug, Clone)]
pub struct InternalTls {
    /// For its listener, which lets nobody in without a certificate of the authority, and for the name where there is one.
    pub server: ServerTls,
    /// For what it dials.
    pub client: ClientTls,
}

impl InternalTls {
    /// Read the files for the first time. `name` is what every certificate is for; the host that is dialled without it.
    ///
    /// # Errors
    /// A file cannot be read or used, or the name is none.
    pub fn read(
        identity: Identity,
        authority: std::path::PathBuf,
        name: Option<String>,
    ) -> Result<Self, TlsError> {
        Ok(Self {
            server: ServerTls::read(ServerFiles {
                identity: identity.clone(),
                client_authority: Some(authority.clone()),
                client_name: name.clone(),
                protocols: Protocols::Http2,
            })?,
            client: ClientTls::of_role(ClientFiles {
                identity: Some(identity),
                authority: Some(authority),
                name,
            })?,
        })
    }

    /// Warn of a certificate that is not for `host`, which the other roles will dial, where there is no name for all.
    pub fn tell_unless_for(&self, host: &str) {
        self.server.tell_unless_for(host);
    }

    /// Read the files again whenever they change, until this is dropped.
    pub fn watch(&self) -> [Watch; 2] {
        [self.server.watch(), self.client.watch()]
    }
}
